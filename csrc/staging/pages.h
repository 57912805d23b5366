// Pages: memory in huge ones, and those of destinations: whether they exist yet, and making them ready ahead of the
// reads.
//
// Why: direct I/O into 4 KiB pages is several times slower than into huge pages, and a read that has to fault its pages
// in waits for each of them to be zeroed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>

#include "plan/geometry.h"

namespace weightlift {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Memory of one's own in huge pages, which cost memory from their first use on.
class HugeMapping {
 public:
  // Throws std::bad_alloc.
  explicit HugeMapping(int64_t bytes);
  ~HugeMapping();
  HugeMapping(const HugeMapping&) = delete;
  HugeMapping& operator=(const HugeMapping&) = delete;

  std::byte* data() const { return data_; }  // aligned to kHugePageBytes

 private:
  size_t reserved_;
  void* memory_;
  std::byte* data_;
};

// What a huge page takes at most where memory is at hand. As a rule it is half of it; but where a virtual machine has
// given its free memory back, the host has to find each of them again: 2.5 to 4.6 ms.
inline constexpr std::chrono::microseconds kHugePageAtHand{400};

// Has the whole pages of the range made, writable; returns how long that took. Contents are not changed. Failure is no
// error: the pages then come when they are written to.
std::chrono::nanoseconds populate(ByteRange memory);

// Whether hardly a page of the range has been touched. One per huge page is looked at, and one in eight may have been:
// an allocator leaves its marks between blocks. Memory that can't be asked about counts as touched.
bool pages_untouched(ByteRange memory);

// Asks for huge pages, when they are touched, wherever they lie wholly inside the ranges. Contents are not changed.
void advise_huge_pages(std::span<const ByteRange> memory);

// Whether huge pages come sooner than small ones, found out by touching a few MiB of the ranges, which nobody has
// touched. As a rule they take a third of the time; but where they are not at hand, 2 MiB of small pages, which come
// from what was in use, take 0.7 ms.
bool huge_pages_come_sooner(std::span<const ByteRange> memory);

// Prepares memory: advises the huge pages that lie wholly inside a range at once, and populates its whole pages, range
// after range, on a thread. Contents are not changed, so neighbours on the same pages don't mind. Threads: any may
// call. `on_progress(n)` is called, on the preparer's thread, when the first n ranges are ready.
class PagePreparer {
 public:
  explicit PagePreparer(std::function<void(int64_t)> on_progress);
  ~PagePreparer();  // drops what is queued, waits for the range in work
  PagePreparer(const PagePreparer&) = delete;
  PagePreparer& operator=(const PagePreparer&) = delete;

  // Ranges that are parts of one memory should meet at multiples of kHugePageBytes.
  // Returns the count of ranges queued so far, this one included: what on_progress will have reached when it is ready.
  int64_t queue(ByteRange memory);

 private:
  void run();

  std::function<void(int64_t)> on_progress_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ByteRange> queue_;
  int64_t queued_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weightlift

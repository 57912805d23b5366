#include "staging/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <vector>

#include "util/align.h"
#include "util/threads.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace weightlift {
namespace {

// One page in so many may have been touched.
constexpr int64_t kMaxTouched = 8;

// How many huge pages are touched to learn how long one takes; less than this, and small ones need not be.
constexpr size_t kTrials = 4;

// madvise(2) of the pages that lie wholly inside the range.
void advise(ByteRange memory, int64_t page, int advice) {
  const int64_t begin = align_up(memory.begin, page);
  const int64_t end = align_down(memory.end, page);
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), advice);
}

}  // namespace

HugeMapping::HugeMapping(int64_t bytes) : reserved_(static_cast<size_t>(bytes + kHugePageBytes)) {
  memory_ = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory_, reserved_, MADV_HUGEPAGE);
  data_ = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<int64_t>(memory_), kHugePageBytes));
}

HugeMapping::~HugeMapping() { ::munmap(memory_, reserved_); }

std::chrono::nanoseconds populate(ByteRange memory) {
  const auto begin = std::chrono::steady_clock::now();
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  // In steps, since each call holds a lock that whoever maps memory waits for: other threads' allocations, and submit.
  for (int64_t at = memory.begin; at < memory.end;) {
    const int64_t end = std::min(align_down(at, kHugePageBytes) + kHugePageBytes, memory.end);
    advise({at, end}, page, MADV_POPULATE_WRITE);
    at = end;
  }
  return std::chrono::steady_clock::now() - begin;
}

bool pages_untouched(ByteRange memory) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  int64_t num_pages = 0;
  int64_t num_touched = 0;
  for (int64_t at = align_up(memory.begin, page); at + page <= memory.end; at += kHugePageBytes) {
    unsigned char resident = 0;
    if (::mincore(reinterpret_cast<void*>(at), static_cast<size_t>(page), &resident) != 0) return false;
    ++num_pages;
    num_touched += resident & 1;
  }
  return num_touched * kMaxTouched <= num_pages;
}

void advise_huge_pages(std::span<const ByteRange> memory) {
  for (ByteRange range : memory) advise(range, kHugePageBytes, MADV_HUGEPAGE);
}

bool huge_pages_come_sooner(std::span<const ByteRange> memory) {
  std::vector<ByteRange> pages;  // all that lie wholly inside
  for (ByteRange range : memory) {
    for (int64_t at = align_up(range.begin, kHugePageBytes); at + kHugePageBytes <= range.end; at += kHugePageBytes) {
      pages.push_back({at, at + kHugePageBytes});
    }
  }
  if (pages.size() <= kTrials) return true;  // too few to tell by, or to lose
  std::chrono::nanoseconds huge{};
  for (size_t i = 0; i < kTrials; ++i) {  // far apart: neighbours tend to be alike
    const ByteRange page = pages[i * pages.size() / kTrials];
    advise(page, kHugePageBytes, MADV_HUGEPAGE);
    huge += populate(page);
  }
  return huge <= kTrials * kHugePageAtHand || huge <= kTrials * populate(pages.back());
}

PagePreparer::PagePreparer(std::function<void(int64_t)> on_progress)
    : on_progress_(std::move(on_progress)), thread_(start_thread("wl-pages", [this] { run(); })) {}

PagePreparer::~PagePreparer() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  thread_.join();
}

int64_t PagePreparer::queue(ByteRange memory) {
  advise(memory, kHugePageBytes, MADV_HUGEPAGE);
  std::lock_guard lock(mutex_);
  queue_.push_back(memory);
  changed_.notify_all();
  return ++queued_;
}

void PagePreparer::run() {
  std::unique_lock lock(mutex_);
  int64_t done = 0;
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const ByteRange memory = queue_.front();
    queue_.pop_front();
    lock.unlock();
    populate(memory);
    on_progress_(++done);
    lock.lock();
  }
}

}  // namespace weightlift

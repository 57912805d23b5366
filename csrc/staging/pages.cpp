#include "staging/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include "util/align.h"
#include "util/threads.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace weightlift {

bool pages_untouched(ByteRange memory) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  for (int64_t at = align_up(memory.begin, page); at + page <= memory.end; at += kHugePageBytes) {
    unsigned char resident = 0;
    if (::mincore(reinterpret_cast<void*>(at), static_cast<size_t>(page), &resident) != 0 || (resident & 1))
      return false;
  }
  return true;
}

void prepare_pages(ByteRange memory) {
  const int64_t huge_begin = align_up(memory.begin, kHugePageBytes);
  const int64_t huge_end = align_down(memory.end, kHugePageBytes);
  if (huge_begin < huge_end) {
    ::madvise(reinterpret_cast<void*>(huge_begin), static_cast<size_t>(huge_end - huge_begin), MADV_HUGEPAGE);
  }
  // Whole pages only: those at the edges belong to neighbours too.
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  const int64_t begin = align_up(memory.begin, page);
  const int64_t end = align_down(memory.end, page);
  if (begin < end) {
    ::madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), MADV_POPULATE_WRITE);
  }
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
    prepare_pages(memory);
    on_progress_(++done);
    lock.lock();
  }
}

}  // namespace weightlift

// BufferRing: the staging memory, one reservation of huge pages cut into equal buffers that are used over and over.
//
// Memory: address space for all buffers is reserved at once; a buffer costs memory from its first use on. The buffer
// that was returned last is handed out first, so that a load that keeps few busy touches few. Threads: none of its own;
// the caller serialises.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "staging/pages.h"
#include "util/align.h"

namespace weightlift {

class BufferRing {
 public:
  // REQUIRES: buffer_bytes a multiple of 4096, num_buffers > 0. Throws std::bad_alloc.
  BufferRing(int64_t buffer_bytes, int num_buffers) : buffer_bytes_(buffer_bytes) {
    reserved_ = static_cast<size_t>(buffer_bytes * num_buffers + kHugePageBytes);
    memory_ = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(memory_, reserved_, MADV_HUGEPAGE);
    base_ = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<int64_t>(memory_), kHugePageBytes));
    for (int i = num_buffers; i-- > 0;) free_.push_back(i);
  }
  ~BufferRing() { ::munmap(memory_, reserved_); }
  BufferRing(const BufferRing&) = delete;
  BufferRing& operator=(const BufferRing&) = delete;

  bool empty() const { return free_.empty(); }
  // REQUIRES: !empty().
  int take() {
    const int buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void give_back(int buffer) { free_.push_back(buffer); }

  std::byte* address(int buffer) const { return base_ + buffer * buffer_bytes_; }
  int64_t buffer_bytes() const { return buffer_bytes_; }

 private:
  const int64_t buffer_bytes_;
  size_t reserved_;
  void* memory_;
  std::byte* base_;
  std::vector<int> free_;
};

}  // namespace weightlift

// BufferRing: the staging memory, one reservation of huge pages cut into equal buffers that are used over and over.
//
// Memory: address space for all buffers is reserved at once; a buffer costs memory from its first use on. Those in
// front are handed out first, so that a load that keeps few busy touches few, and would_grow() tells who could wait.
// What is larger than a buffer gets several that are neighbours; what is larger than all of them gets memory of its
// own, for one taker at a time. Threads: none of its own; the caller serialises.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "staging/pages.h"

namespace weightlift {

// Neighbouring buffers of the ring, or memory of its own.
struct StagingBuffer {
  std::byte* memory = nullptr;
  int first = -1;  // buffers [first, first + count) of the ring; count 0: none of them
  int count = 0;
};

class BufferRing {
 public:
  // REQUIRES: buffer_bytes a multiple of 4096, num_buffers > 0. Throws std::bad_alloc.
  BufferRing(int64_t buffer_bytes, int num_buffers)
      : buffer_bytes_(buffer_bytes),
        memory_(buffer_bytes * num_buffers),
        is_free_(static_cast<size_t>(num_buffers), true) {}
  BufferRing(const BufferRing&) = delete;
  BufferRing& operator=(const BufferRing&) = delete;

  bool has_room(int64_t bytes) const {
    return is_large(bytes) ? !large_.has_value() : find(count_for(bytes)) != is_free_.end();
  }
  // REQUIRES: has_room(bytes). Whether take(bytes) would hand out memory that nobody has used yet.
  bool would_grow(int64_t bytes) const {
    return is_large(bytes) || find(count_for(bytes)) - is_free_.begin() + count_for(bytes) > num_used_;
  }
  // REQUIRES: bytes > 0, has_room(bytes). Throws std::bad_alloc where there is no memory for more than the ring holds.
  StagingBuffer take(int64_t bytes) {
    if (is_large(bytes)) {
      large_.emplace(bytes);
      return {large_->data(), -1, 0};
    }
    const int count = count_for(bytes);
    const auto found = find(count);
    const auto first = static_cast<int>(found - is_free_.begin());
    std::fill_n(is_free_.begin() + first, count, false);
    num_used_ = std::max(num_used_, first + count);
    return {address(first), first, count};
  }
  void give_back(const StagingBuffer& buffer) {
    if (buffer.count == 0) {
      large_.reset();
    } else {
      std::fill_n(is_free_.begin() + buffer.first, buffer.count, true);
    }
  }

  std::byte* address(int buffer) const { return memory_.data() + buffer * buffer_bytes_; }
  int64_t buffer_bytes() const { return buffer_bytes_; }
  int num_buffers() const { return static_cast<int>(is_free_.size()); }

 private:
  int count_for(int64_t bytes) const { return static_cast<int>((bytes + buffer_bytes_ - 1) / buffer_bytes_); }
  bool is_large(int64_t bytes) const { return bytes > buffer_bytes_ * static_cast<int64_t>(is_free_.size()); }
  std::vector<bool>::const_iterator find(int count) const {
    return std::search_n(is_free_.begin(), is_free_.end(), count, true);
  }

  const int64_t buffer_bytes_;
  HugeMapping memory_;
  std::vector<bool> is_free_;
  int num_used_ = 0;  // buffers that have been handed out, those in front
  std::optional<HugeMapping> large_;
};

}  // namespace weightlift

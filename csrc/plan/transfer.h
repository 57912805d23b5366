// Transfer: one recorded copy, from a strided view of a file to a strided view of memory; or an op in place of the
// copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transform/element.h"
#include "transform/op.h"

namespace weightlift {

// Where a destination is, when it is no GPU's memory.
inline constexpr int32_t kHost = -1;

// One dimension of a transfer: both sides have the same sizes, each its own strides, in bytes and never negative.
struct Dim {
  int64_t size;
  int64_t src_stride;  // 0: the source repeats (expand)
  int64_t dst_stride;
  bool operator==(const Dim&) const = default;
};

// Canonical form (made by make_transfer(), relied upon by everything behind it): no dimension of size 1; source strides
// descend, so that counting elements in this order ("source order") walks the file forwards; neighbouring dimensions
// that are one on both sides are merged. A scalar, or a copy of one element, has no dimensions. Every size is > 0.
struct Transfer {
  int64_t id = 0;          // position in the program; errors and completions name it
  int32_t file = 0;        // index of the file
  ElementType src_type{};  // as on disk
  ElementType dst_type{};  // as in memory: equal to src_type (bytes are moved), or what it can_convert() to
  int64_t src_offset = 0;  // of the first element, from the start of the file, bytes
  std::byte* dst = nullptr;
  std::vector<Dim> dims;
  // What becomes of the elements on their way, where that is more than a copy: its one output is the destination, and
  // `dims` walk its source rows byte by byte (their destination strides say where a byte lies among packed rows).
  std::shared_ptr<const Op> op = nullptr;
  int32_t device = kHost;  // whose memory the destination is: kHost, or the index of a GPU

  int64_t num_elements() const {
    int64_t n = 1;
    for (const Dim& dim : dims) n *= dim.size;
    return n;
  }
  // Elements that have to arrive together: parts begin at multiples of it, and end at one or at num_elements().
  int64_t granule() const { return op ? op->source().granule_rows * op->source().row_bytes : 1; }
  // One run of bytes on both sides, which may be cut at any byte: what make_transfer() makes of contiguous copies.
  bool is_plain() const {
    return !op && src_type == ElementType::kBytes1 && dst_type == ElementType::kBytes1 && dims.size() == 1 &&
           dims[0].src_stride == 1 && dims[0].dst_stride == 1;
  }
};

// Brings a transfer with dims in any order into canonical form. A copy between two contiguous views becomes one of
// bytes, so that it may be cut anywhere. REQUIRES: sizes > 0, strides >= 0.
Transfer make_transfer(int64_t id, int32_t file, ElementType src_type, int64_t src_offset, ElementType dst_type,
                       std::byte* dst, std::vector<Dim> dims, int32_t device = kHost);

// A transfer whose bytes are an op's source rows, `src_row_stride` bytes apart. Throws std::invalid_argument where rows
// overlap on either side, or the op has not exactly one output.
Transfer make_op_transfer(int64_t id, int32_t file, int64_t src_offset, int64_t src_row_stride,
                          std::shared_ptr<const Op> op, int32_t device = kHost);

}  // namespace weightlift

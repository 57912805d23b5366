// Strided geometry: the questions that planning asks about views, answered exactly and in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "plan/transfer.h"

namespace weightlift {

// Half-open range of bytes.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

// Brings dims into the canonical form of Transfer (see there). REQUIRES: sizes > 0, strides >= 0.
// Dimensions with source stride 0 come last. Ties keep the larger destination stride outside.
void canonicalise(std::vector<Dim>& dims);

// Whether source order walks forwards without interleaving: each source stride is at least the extent of all that lies
// inside it (or 0). True for whatever narrow, select, transpose, expand and view make of a contiguous tensor; false for
// overlapping windows (unfold, as_strided), which the planner does not take.
bool source_is_nested(const Transfer& transfer);

// Whether no two elements of the destination share a byte, as far as it can be told without looking at each: false also
// for some odd strides that do not.
bool destination_is_nested(const Transfer& transfer);

// Bytes of the file, from the transfer's first to its last needed byte.
ByteRange source_bounds(const Transfer& transfer);

// Addresses from the first to behind the last byte that a transfer writes.
ByteRange destination_bounds(const Transfer& transfer);

// How many bytes a transfer writes.
int64_t destination_bytes(const Transfer& transfer);

// Where element number `index` in source order lies, as a byte offset from the first element. REQUIRES: index <
// num_elements.
int64_t source_byte(const Transfer& transfer, int64_t index);

// The number of elements, in source order, that end at or before byte `end` (counted from the start of the file).
// REQUIRES: source_is_nested(transfer).
int64_t elements_ending_by(const Transfer& transfer, int64_t end);

// Region: a set of bytes of memory, one strided box of elements. Used for destinations, pending or looked at.
struct RegionDim {
  int64_t size;
  int64_t stride;  // bytes, >= 0
  bool operator==(const RegionDim&) const = default;
};

class Region {
 public:
  // `begin` is the address of the first element. Sizes of 0 make the region empty. Dimensions may come in any order,
  // and may repeat or overlap bytes. Dimensions that together form longer runs or longer dimensions are merged.
  Region(int64_t begin, int64_t item_bytes, std::vector<RegionDim> dims);

  static Region destination_of(const Transfer& transfer);

  bool empty() const { return bounds_.begin == bounds_.end; }
  ByteRange bounds() const { return bounds_; }
  // Whether every byte of bounds() belongs to the region.
  bool contiguous() const { return dims_.empty(); }

  // Calls visit(range) for the region's maximal runs of bytes, ascending and disjoint, until it returns false.
  void visit_runs(const std::function<bool(ByteRange)>& visit) const;
  std::vector<ByteRange> runs() const;

  // Exact, byte for byte. Constant time when bounds are disjoint, for two contiguous regions, and for slices of one
  // matrix (equal outer strides); else at most linear in the number of runs, n log n where runs interleave.
  bool overlaps(const Region& other) const;
  bool covers(const Region& other) const;

 private:
  int64_t begin_;
  int64_t run_bytes_;            // bytes of each innermost run
  std::vector<RegionDim> dims_;  // around the runs, strides descending; empty: one run
  bool nested_;                  // runs in loop order are ascending and disjoint; else they must be sorted
  ByteRange bounds_;
};

// Sorted, disjoint ranges: merges what overlaps or touches. Returns, in `overlapped` if given, the ranges (merged) that
// were covered more than once.
std::vector<ByteRange> unite(std::vector<ByteRange> ranges, std::vector<ByteRange>* overlapped = nullptr);

// The parts of `whole` that no range of `united` (sorted, disjoint) covers.
std::vector<ByteRange> gaps(ByteRange whole, const std::vector<ByteRange>& united);

}  // namespace weightlift

#include "plan/geometry.h"

#include <algorithm>
#include <span>
#include <utility>

namespace weightlift {

void canonicalise(std::vector<Dim>& dims) {
  std::erase_if(dims, [](const Dim& dim) { return dim.size == 1; });
  std::ranges::sort(dims, [](const Dim& a, const Dim& b) {
    return std::pair(a.src_stride, a.dst_stride) > std::pair(b.src_stride, b.dst_stride);
  });
  std::vector<Dim> merged;
  for (const Dim& dim : dims) {
    const int64_t size = dim.size;
    if (!merged.empty() && merged.back().src_stride == size * dim.src_stride &&
        merged.back().dst_stride == size * dim.dst_stride) {
      merged.back() = {merged.back().size * size, dim.src_stride, dim.dst_stride};
    } else {
      merged.push_back(dim);
    }
  }
  dims = std::move(merged);
}

bool source_is_nested(const Transfer& transfer) {
  int64_t extent = element_bytes(transfer.src_type);
  for (auto dim = transfer.dims.rbegin(); dim != transfer.dims.rend(); ++dim) {
    if (dim->src_stride == 0) continue;
    if (dim->src_stride < extent) return false;
    extent += (dim->size - 1) * dim->src_stride;
  }
  return true;
}

bool destination_is_nested(const Transfer& transfer) {
  Transfer mirrored = transfer;
  for (Dim& dim : mirrored.dims) std::swap(dim.src_stride, dim.dst_stride);
  mirrored.src_type = transfer.dst_type;
  canonicalise(mirrored.dims);
  return source_is_nested(mirrored) &&
         std::ranges::none_of(mirrored.dims, [](const Dim& dim) { return dim.src_stride == 0; });
}

ByteRange source_bounds(const Transfer& transfer) {
  ByteRange bounds{transfer.src_offset, transfer.src_offset + element_bytes(transfer.src_type)};
  for (const Dim& dim : transfer.dims) bounds.end += (dim.size - 1) * dim.src_stride;
  return bounds;
}

ByteRange destination_bounds(const Transfer& transfer) {
  const auto begin = reinterpret_cast<int64_t>(transfer.dst);
  if (transfer.op) {
    const OpOutput& output = transfer.op->outputs().front();
    return {begin, begin + (output.num_rows - 1) * output.row_stride + output.row_bytes};
  }
  int64_t end = begin + element_bytes(transfer.dst_type);
  for (const Dim& dim : transfer.dims) end += (dim.size - 1) * dim.dst_stride;
  return {begin, end};
}

int64_t destination_bytes(const Transfer& transfer) {
  if (transfer.op) return transfer.op->outputs().front().num_rows * transfer.op->outputs().front().row_bytes;
  return transfer.num_elements() * element_bytes(transfer.dst_type);
}

int64_t source_byte(const Transfer& transfer, int64_t index) {
  int64_t byte = 0;
  for (auto dim = transfer.dims.rbegin(); dim != transfer.dims.rend(); ++dim) {
    byte += index % dim->size * dim->src_stride;
    index /= dim->size;
  }
  return byte;
}

int64_t elements_ending_by(const Transfer& transfer, int64_t end) {
  int64_t room = end - transfer.src_offset;         // bytes up to `end`, from where the rest of the search begins
  int64_t extent = source_bounds(transfer).size();  // of the dimensions from here inwards
  int64_t elements = transfer.num_elements();       // in them
  int64_t ended = 0;
  for (const Dim& dim : transfer.dims) {
    if (dim.src_stride == 0) break;  // stride 0 comes last: what is left are repeats of one element
    elements /= dim.size;
    extent -= (dim.size - 1) * dim.src_stride;
    if (room < extent) continue;  // not even the first one ends in time, a part of it may
    const int64_t whole = std::min(dim.size, (room - extent) / dim.src_stride + 1);
    ended += whole * elements;
    if (whole == dim.size) return ended;
    room -= whole * dim.src_stride;
  }
  return room < extent ? ended : ended + elements;
}

namespace {

// The part of a region in which the indices of some outer dimensions are chosen.
struct Box {
  int64_t begin;
  int64_t end;  // of the last byte
  std::span<const RegionDim> dims;

  const RegionDim& outer() const { return dims.front(); }

  // What lies inside the outermost dimension, at its index `i`.
  Box inside(int64_t i) const {
    const int64_t shift = i * outer().stride;
    return {begin + shift, end + shift - (outer().size - 1) * outer().stride, dims.subspan(1)};
  }
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Half-open range of the k within [lowest, highest] for which the bounds of `moved`, k * stride further, meet
// `fixed`'s.
struct Steps {
  int64_t first;
  int64_t last;
};
Steps steps_to_meet(const Box& moved, const Box& fixed, int64_t stride, int64_t lowest, int64_t highest) {
  return {std::max(lowest, floor_div(fixed.begin - moved.end, stride) + 1),
          std::min(highest, floor_div(fixed.end - 1 - moved.begin, stride)) + 1};
}

bool boxes_overlap(const Box& a, const Box& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.dims.empty() && b.dims.empty()) return true;

  // In step, as the slices of one matrix are: only the difference of the two indices matters, and for all but a few
  // differences the insides are apart.
  if (!a.dims.empty() && !b.dims.empty() && a.outer().stride == b.outer().stride) {
    const Box a_inside = a.inside(0);
    const Box b_inside = b.inside(0);
    const int64_t stride = a.outer().stride;
    const Steps steps = steps_to_meet(a_inside, b_inside, stride, 1 - b.outer().size, a.outer().size - 1);
    for (int64_t k = steps.first; k < steps.last; ++k) {
      if (boxes_overlap(a.inside(k), b_inside)) return true;
    }
    return false;
  }

  const bool split_a = b.dims.empty() || (!a.dims.empty() && a.outer().stride > b.outer().stride);
  const Box& split = split_a ? a : b;
  const Box& whole = split_a ? b : a;
  const Steps steps = steps_to_meet(split.inside(0), whole, split.outer().stride, 0, split.outer().size - 1);
  for (int64_t k = steps.first; k < steps.last; ++k) {
    if (boxes_overlap(split.inside(k), whole)) return true;
  }
  return false;
}

// REQUIRES: `a` is nested.
bool box_covers(const Box& a, const Box& b) {
  if (b.begin < a.begin || a.end < b.end) return false;
  if (a.dims.empty()) return true;

  // Nothing but the inside at index i of `a` has bytes in a.begin + [i, i + 1) * stride.
  const int64_t stride = a.outer().stride;
  const int64_t index = (b.begin - a.begin) / stride;
  const int64_t boundary = a.begin + (index + 1) * stride;
  if (b.end <= boundary) return box_covers(a.inside(index), b);

  if (b.dims.empty()) {
    return box_covers(a.inside(index), {b.begin, boundary, {}}) && box_covers(a, {boundary, b.end, {}});
  }
  const Box b_inside = b.inside(0);
  if (b.outer().stride == stride && b_inside.end <= boundary) {  // in step: each inside meets the same bytes
    return index + b.outer().size <= a.outer().size && box_covers(a.inside(index), b_inside);
  }
  for (int64_t k = 0; k < b.outer().size; ++k) {
    if (!box_covers(a, b.inside(k))) return false;
  }
  return true;
}

// Calls visit(begin) for the first byte of each run, in loop order, until it returns false.
template <typename Visit>
bool visit_run_begins(int64_t begin, std::span<const RegionDim> dims, const Visit& visit) {
  if (dims.empty()) return visit(begin);
  for (int64_t i = 0; i < dims.front().size; ++i) {
    if (!visit_run_begins(begin + i * dims.front().stride, dims.subspan(1), visit)) return false;
  }
  return true;
}

}  // namespace

Region::Region(int64_t begin, int64_t item_bytes, std::vector<RegionDim> dims)
    : begin_(begin), run_bytes_(item_bytes), nested_(true), bounds_{begin, begin} {
  const bool empty = std::ranges::any_of(dims, [](const RegionDim& dim) { return dim.size == 0; });
  if (empty || item_bytes == 0) return;
  std::erase_if(dims, [](const RegionDim& dim) { return dim.size == 1 || dim.stride == 0; });
  std::ranges::sort(dims, {}, &RegionDim::stride);

  // From the inside out. Steps no longer than a run make one longer run; steps of a whole number of inner steps, no
  // longer than these reach, make one longer dimension. What is left after this is contiguous only without dimensions:
  // else the byte behind the first run is missing.
  for (const RegionDim& dim : dims) {
    const int64_t reach = (dim.size - 1) * dim.stride;
    if (dims_.empty() && dim.stride <= run_bytes_) {
      run_bytes_ += reach;
      continue;
    }
    if (!dims_.empty()) {
      RegionDim& inner = dims_.back();
      if (dim.stride % inner.stride == 0 && dim.stride / inner.stride <= inner.size) {
        inner.size += reach / inner.stride;
        continue;
      }
    }
    dims_.push_back(dim);
  }
  int64_t extent = run_bytes_;
  for (const RegionDim& dim : dims_) {
    nested_ = nested_ && dim.stride >= extent;
    extent += (dim.size - 1) * dim.stride;
  }
  std::ranges::reverse(dims_);
  bounds_.end = begin + extent;
}

Region Region::destination_of(const Transfer& transfer) {
  if (transfer.op) {
    const OpOutput& output = transfer.op->outputs().front();
    return Region(reinterpret_cast<int64_t>(output.data), output.row_bytes, {{output.num_rows, output.row_stride}});
  }
  std::vector<RegionDim> dims;
  dims.reserve(transfer.dims.size());
  for (const Dim& dim : transfer.dims) dims.push_back({dim.size, dim.dst_stride});
  return Region(reinterpret_cast<int64_t>(transfer.dst), element_bytes(transfer.dst_type), std::move(dims));
}

void Region::visit_runs(const std::function<bool(ByteRange)>& visit) const {
  if (empty()) return;
  if (!nested_) {
    std::vector<ByteRange> ranges;
    visit_run_begins(begin_, dims_, [&](int64_t begin) {
      ranges.push_back({begin, begin + run_bytes_});
      return true;
    });
    for (const ByteRange& range : unite(std::move(ranges))) {
      if (!visit(range)) return;
    }
    return;
  }
  ByteRange run{begin_, begin_};  // grows while runs touch: the last of one row and the first of the next may
  const bool wanted = visit_run_begins(begin_, dims_, [&](int64_t begin) {
    if (begin != run.end) {
      if (!visit(run)) return false;
      run.begin = begin;
    }
    run.end = begin + run_bytes_;
    return true;
  });
  if (wanted) visit(run);
}

std::vector<ByteRange> Region::runs() const {
  std::vector<ByteRange> runs;
  visit_runs([&](ByteRange run) {
    runs.push_back(run);
    return true;
  });
  return runs;
}

bool Region::overlaps(const Region& other) const {
  if (empty() || other.empty() || bounds_.end <= other.bounds_.begin || other.bounds_.end <= bounds_.begin)
    return false;
  if (nested_ && other.nested_) {
    return boxes_overlap({bounds_.begin, bounds_.end, dims_}, {other.bounds_.begin, other.bounds_.end, other.dims_});
  }
  const std::vector<ByteRange> mine = runs();
  auto run = mine.begin();
  bool found = false;
  other.visit_runs([&](ByteRange wanted) {
    while (run != mine.end() && run->end <= wanted.begin) ++run;
    found = run != mine.end() && run->begin < wanted.end;
    return !found && run != mine.end();
  });
  return found;
}

bool Region::covers(const Region& other) const {
  if (other.empty()) return true;
  if (other.bounds_.begin < bounds_.begin || bounds_.end < other.bounds_.end) return false;
  if (nested_) {
    return box_covers({bounds_.begin, bounds_.end, dims_}, {other.bounds_.begin, other.bounds_.end, other.dims_});
  }
  const std::vector<ByteRange> mine = runs();
  auto run = mine.begin();
  bool covered = true;
  other.visit_runs([&](ByteRange wanted) {
    while (run != mine.end() && run->end < wanted.end) ++run;
    covered = run != mine.end() && run->begin <= wanted.begin;
    return covered;
  });
  return covered;
}

std::vector<ByteRange> unite(std::vector<ByteRange> ranges, std::vector<ByteRange>* overlapped) {
  if (overlapped != nullptr) overlapped->clear();
  std::erase_if(ranges, [](const ByteRange& range) { return range.size() <= 0; });
  std::ranges::sort(ranges, {}, &ByteRange::begin);
  const auto append = [](std::vector<ByteRange>& united, ByteRange range) {
    if (!united.empty() && range.begin <= united.back().end) {
      united.back().end = std::max(united.back().end, range.end);
    } else {
      united.push_back(range);
    }
  };
  std::vector<ByteRange> united;
  for (const ByteRange& range : ranges) {
    if (overlapped != nullptr && !united.empty() && range.begin < united.back().end) {
      append(*overlapped, {range.begin, std::min(range.end, united.back().end)});
    }
    append(united, range);
  }
  return united;
}

std::vector<ByteRange> gaps(ByteRange whole, const std::vector<ByteRange>& united) {
  std::vector<ByteRange> missing;
  for (const ByteRange& range : united) {
    if (range.end <= whole.begin) continue;
    if (range.begin >= whole.end) break;
    if (range.begin > whole.begin) missing.push_back({whole.begin, range.begin});
    whole.begin = range.end;
  }
  if (whole.begin < whole.end) missing.push_back(whole);
  return missing;
}

}  // namespace weightlift

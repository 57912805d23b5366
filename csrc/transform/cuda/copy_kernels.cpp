#include "transform/cuda/copy_kernels.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "transform/cuda/copy_kernel.h"
#include "transform/cuda/launch.h"

namespace weightlift {
namespace {

// Sides of a plane below which a transposing copy gains nothing from going through memory of the block.
constexpr int64_t kMinTransposedSide = 8;
constexpr Dim kOne{1, 0, 0};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

ElementConversion conversion_of(ElementType src, ElementType dst) {
  ElementConversion conversion;
  conversion.needed = src != dst;
  conversion.through = through(src, dst);
  conversion.src_part = part_of(src);
  conversion.dst_part = part_of(dst);
  conversion.src_part_bytes = static_cast<int8_t>(element_bytes(part_of(src)));
  conversion.dst_part_bytes = static_cast<int8_t>(element_bytes(part_of(dst)));
  conversion.src_bytes = static_cast<int8_t>(element_bytes(src));
  conversion.dst_bytes = static_cast<int8_t>(element_bytes(dst));
  return conversion;
}

// Gathers boxes, and launches them when no more fit.
template <bool kConverts>
class Launches {
 public:
  explicit Launches(DeviceStream stream) : stream_(stream) {}

  void add(CopyBox box) {
    if (status_ != 0) return;
    box.end_tile = box.outer[0].size * box.outer[1].size * box.plane_tiles;
    if (kernel_.num_boxes != 0) box.end_tile += kernel_.tiles();
    kernel_.boxes[kernel_.num_boxes++] = box;
    if (kernel_.num_boxes == CopyKernel<kConverts>::kMaxBoxes) flush();
  }

  int flush() {
    if (status_ == 0 && kernel_.num_boxes != 0) status_ = launch(kernel_, stream_);
    kernel_.num_boxes = 0;
    return status_;
  }

 private:
  CopyKernel<kConverts> kernel_{};
  DeviceStream stream_;
  int status_ = 0;
};

// One copy as boxes.
class Boxes {
 public:
  Boxes(const DeviceCopy& copy, Launches<false>& moves, Launches<true>& conversions)
      : conversion_(conversion_of(copy.transfer->src_type, copy.transfer->dst_type)),
        src_(copy.src),
        src_start_(copy.transfer->src_offset - copy.src_file_offset),
        dst_(copy.transfer->dst),
        moves_(moves),
        conversions_(conversions) {}

  // Elements [first, last) of the box `dims`, whose first element lies at these byte offsets from the transfer's first.
  void add_range(std::span<const Dim> dims, int64_t first, int64_t last, int64_t src_byte, int64_t dst_byte) const {
    if (first == last) return;
    if (dims.empty()) return add_box({}, src_byte, dst_byte);
    const Dim& outer = dims.front();
    const std::span<const Dim> inner = dims.subspan(1);
    int64_t inner_elements = 1;
    for (const Dim& dim : inner) inner_elements *= dim.size;
    const auto add_part = [&](int64_t index, int64_t part_first, int64_t part_last) {
      add_range(inner, part_first, part_last, src_byte + index * outer.src_stride, dst_byte + index * outer.dst_stride);
    };
    int64_t index = first / inner_elements;
    const int64_t last_index = last / inner_elements;
    const int64_t head = first % inner_elements;
    const int64_t tail = last % inner_elements;
    if (index == last_index) return add_part(index, head, tail);
    if (head != 0) add_part(index++, head, inner_elements);
    if (index < last_index) {
      std::vector<Dim> box(dims.begin(), dims.end());
      box.front().size = last_index - index;
      add_box(std::move(box), src_byte + index * outer.src_stride, dst_byte + index * outer.dst_stride);
    }
    add_part(last_index, 0, tail);
  }

 private:
  void add_box(std::vector<Dim> dims, int64_t src_byte, int64_t dst_byte) const {
    CopyBox box{};
    box.src = src_ + (src_start_ + src_byte);
    box.dst = dst_ + dst_byte;
    box.conversion = conversion_;
    std::erase_if(dims, [](const Dim& dim) { return dim.size == 1; });
    const auto take = [&dims](auto dim) {
      if (dim == dims.end()) return kOne;
      const Dim taken = *dim;
      dims.erase(dim);
      return taken;
    };
    const auto contiguous = std::ranges::find_if(dims, [this](const Dim& dim) {
      return dim.src_stride == conversion_.src_bytes && dim.dst_stride == conversion_.dst_bytes;
    });
    if (dims.empty() || contiguous != dims.end()) {
      box.columns = dims.empty() ? Dim{1, conversion_.src_bytes, conversion_.dst_bytes} : take(contiguous);
      box.rows = take(std::ranges::max_element(dims, {}, &Dim::size));
      take_rows(box);
    } else {
      const auto along_src = std::ranges::min_element(dims, {}, [](const Dim& dim) {
        return std::pair(dim.src_stride == 0, dim.src_stride);  // what repeats is no neighbour
      });
      const auto along_dst = std::ranges::min_element(dims, {}, &Dim::dst_stride);
      const bool transposed =
          along_src != along_dst && std::min(along_src->size, along_dst->size) >= kMinTransposedSide;
      const Dim rows = *along_src;
      box.columns = take(along_dst);
      box.rows = take(transposed ? std::ranges::find(dims, rows) : std::ranges::max_element(dims, {}, &Dim::size));
      box.way = transposed ? CopyBox::Way::kTransposed : CopyBox::Way::kElements;
    }
    add_outer(box, std::move(dims));
  }

  // Rows that are contiguous on both sides.
  static void take_rows(CopyBox& box) {
    ElementConversion& conversion = box.conversion;
    const bool src_complex = conversion.src_bytes != conversion.src_part_bytes;
    const bool dst_complex = conversion.dst_bytes != conversion.dst_part_bytes;
    if (!conversion.needed) {
      box.way = CopyBox::Way::kBytes;
      box.columns = {box.columns.size * conversion.src_bytes, 1, 1};
    } else if (src_complex != dst_complex) {
      box.way = CopyBox::Way::kElements;
    } else {
      box.way = CopyBox::Way::kNumbers;
      if (src_complex) {  // twice as many numbers
        box.columns.size *= 2;
        conversion.src_bytes = conversion.src_part_bytes;
        conversion.dst_bytes = conversion.dst_part_bytes;
      }
    }
  }

  // Dimensions beyond those that a box has make boxes of their own.
  void add_outer(CopyBox box, std::vector<Dim> dims) const {
    if (dims.size() > 2) {
      const Dim dim = dims.front();
      dims.erase(dims.begin());
      for (int64_t i = 0; i < dim.size; ++i) {
        add_outer(box, dims);
        box.src += dim.src_stride;
        box.dst += dim.dst_stride;
      }
      return;
    }
    dims.insert(dims.begin(), 2 - dims.size(), kOne);
    std::ranges::copy(dims, box.outer);
    const auto stride_of = [](const Dim& dim, auto stride) { return dim.size == 1 ? 0 : dim.*stride; };
    const bool contiguous = box.way == CopyBox::Way::kBytes || box.way == CopyBox::Way::kNumbers;
    const auto alignment = [&](const void* base, auto stride) {
      return static_cast<int8_t>(
          alignment_of({address_of(base), stride_of(box.outer[0], stride), stride_of(box.outer[1], stride),
                        stride_of(box.rows, stride), contiguous ? 0 : stride_of(box.columns, stride)}));
    };
    box.src_alignment = alignment(box.src, &Dim::src_stride);
    box.dst_alignment = alignment(box.dst, &Dim::dst_stride);
    if (box.way == CopyBox::Way::kTransposed) {
      const int64_t side = CopyKernel<false>::side(box.conversion.dst_bytes);
      box.plane_tiles = ceil_div(box.rows.size, side) * ceil_div(box.columns.size, side);
    } else {
      const int64_t unit = box.way == CopyBox::Way::kBytes     ? 16
                           : box.way == CopyBox::Way::kNumbers ? CopyKernel<true>::kNumbersOfUnit
                                                               : 1;
      box.tiles = RowTiles(box.rows.size, ceil_div(box.columns.size, unit));
      box.plane_tiles = box.tiles.tiles();
    }
    if (box.conversion.needed) {
      conversions_.add(box);
    } else {
      moves_.add(box);
    }
  }

  ElementConversion conversion_;
  const std::byte* src_;
  int64_t src_start_;  // of the transfer's first element, from src_: negative if only later elements are at hand
  std::byte* dst_;
  Launches<false>& moves_;
  Launches<true>& conversions_;
};

}  // namespace

int launch_copies(std::span<const DeviceCopy> copies, DeviceStream stream) {
  Launches<false> moves(stream);
  Launches<true> conversions(stream);
  for (const DeviceCopy& copy : copies) {
    Boxes(copy, moves, conversions).add_range(copy.transfer->dims, copy.first, copy.last, 0, 0);
  }
  const int status = moves.flush();
  return status != 0 ? status : conversions.flush();
}

}  // namespace weightlift

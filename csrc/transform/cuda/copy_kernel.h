// The kernel of copies: many strided boxes of elements, moved or converted, in one launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/transfer.h"
#include "transform/cuda/access.h"
#include "transform/cuda/kernel.h"
#include "transform/cuda/numbers.h"

namespace weightlift {

// A box of elements: planes of rows of columns, columns being the dimension in which threads are neighbours.
struct CopyBox {
  enum class Way : uint8_t {
    kBytes,      // rows are contiguous on both sides, and moved: a unit is 16 bytes
    kNumbers,    // the same, and converted: a unit is 8 numbers
    kElements,   // columns are strided on a side, or both: a unit is an element
    kTransposed  // rows are neighbours in the source, columns in the destination: through memory of the block
  };

  const std::byte* src;
  std::byte* dst;
  Dim outer[2];  // around the planes
  Dim rows;
  Dim columns;     // kBytes: bytes
  RowTiles tiles;  // of a plane; not kTransposed
  int64_t plane_tiles;
  int64_t end_tile;  // the tiles of this box and of those before it
  ElementConversion conversion;
  Way way;
  int8_t src_alignment;
  int8_t dst_alignment;
};

template <bool kConverts>
struct CopyKernel : Kernel {
  static constexpr int kPhases = 2;
  // As many as the 4096 bytes hold that every driver takes as parameters.
  static constexpr int kMaxBoxes = 18;
  static constexpr int kNumbersOfUnit = 8;
  // Elements of a side of a tile of a transposing copy, and bytes of a row of it, with one element between rows so that
  // columns don't meet in one bank.
  static WEIGHTLIFT_HOST_DEVICE constexpr int side(int item) { return item <= 4 ? 64 : 32; }
  static WEIGHTLIFT_HOST_DEVICE constexpr int pitch(int item) { return (side(item) + 1) * item; }

  struct Shared {
    alignas(16) std::byte elements[33 * 16 * 32];
  };

  CopyBox boxes[kMaxBoxes];
  int32_t num_boxes;

  int64_t tiles() const { return boxes[num_boxes - 1].end_tile; }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t tile, int thread, Thread&, Shared& shared) const {
    int index = 0;
    while (boxes[index].end_tile <= tile) ++index;
    const CopyBox& box = boxes[index];
    if (index != 0) tile -= boxes[index - 1].end_tile;
    const int64_t plane = tile / box.plane_tiles;
    tile -= plane * box.plane_tiles;
    const int64_t i = plane / box.outer[1].size;
    const int64_t j = plane - i * box.outer[1].size;
    const std::byte* src = box.src + i * box.outer[0].src_stride + j * box.outer[1].src_stride;
    std::byte* dst = box.dst + i * box.outer[0].dst_stride + j * box.outer[1].dst_stride;
    if (box.way == CopyBox::Way::kTransposed) {
      transpose<kPhase>(box, src, dst, tile, thread, shared);
    } else if (kPhase == 0) {
      box.tiles.visit(tile, thread, [&](int64_t row, int64_t unit) {
        copy_unit(box, src + row * box.rows.src_stride, dst + row * box.rows.dst_stride, unit);
      });
    }
  }

 private:
  static WEIGHTLIFT_HOST_DEVICE void copy_unit(const CopyBox& box, const std::byte* src, std::byte* dst, int64_t unit) {
    if (box.way == CopyBox::Way::kBytes) {
      uint32_t words[4];
      const int64_t bytes = box.columns.size - 16 * unit;
      if (bytes >= 16) {
        load16(src + 16 * unit, box.src_alignment, words);
        store16(dst + 16 * unit, box.dst_alignment, words);
      } else {
        load_some(src + 16 * unit, bytes, words);
        store_some(dst + 16 * unit, bytes, words);
      }
    } else if (kConverts && box.way == CopyBox::Way::kNumbers) {
      convert_unit(box, src, dst, unit * kNumbersOfUnit);
    } else {
      uint32_t words[4] = {};
      load_element(src + unit * box.columns.src_stride, box.conversion.src_bytes, box.src_alignment, words);
      convert(box, words);
      store_element(dst + unit * box.columns.dst_stride, box.conversion.dst_bytes, box.dst_alignment, words);
    }
  }

  // Numbers from `first` on of a row.
  static WEIGHTLIFT_HOST_DEVICE void convert_unit(const CopyBox& box, const std::byte* src, std::byte* dst,
                                                  int64_t first) {
    const int64_t src_bytes = box.conversion.src_bytes;
    const int64_t dst_bytes = box.conversion.dst_bytes;
    const int64_t count = box.columns.size - first;
    const bool whole = count >= kNumbersOfUnit;
    uint32_t words[2 * kNumbersOfUnit];
    uint32_t out[2 * kNumbersOfUnit];
    src += first * src_bytes;
    dst += first * dst_bytes;
    if (whole && src_bytes == 1) {
      load8(src, box.src_alignment, words);
    } else {
      load_up_to(src, box.src_alignment, (whole ? kNumbersOfUnit : count) * src_bytes, words);
    }
    convert_numbers<kNumbersOfUnit>(box.conversion, words, out);
    if (whole && dst_bytes == 1) {
      store8(dst, box.dst_alignment, out);
    } else {
      store_up_to(dst, box.dst_alignment, (whole ? kNumbersOfUnit : count) * dst_bytes, out);
    }
  }

  static WEIGHTLIFT_HOST_DEVICE void convert(const CopyBox& box, uint32_t* words) {
    if (!kConverts || !box.conversion.needed) return;
    uint32_t out[4] = {};
    convert_element(box.conversion, words, out);
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = out[i];
  }

  // A tile comes in along the rows, and goes out along the columns.
  template <int kPhase>
  static WEIGHTLIFT_HOST_DEVICE void transpose(const CopyBox& box, const std::byte* src, std::byte* dst, int64_t tile,
                                               int thread, Shared& shared) {
    const int item = box.conversion.dst_bytes;
    const int side_bits = side(item) == 64 ? 6 : 5;
    const int64_t across = (box.columns.size + side(item) - 1) >> side_bits;
    const int64_t down = tile / across;
    const int64_t first_row = down << side_bits;
    const int64_t first_column = (tile - down * across) << side_bits;
    for (int local = thread; local < side(item) * side(item); local += kThreads) {
      const int fast = local & (side(item) - 1);
      const int slow = local >> side_bits;
      const int row = kPhase == 0 ? fast : slow;
      const int column = kPhase == 0 ? slow : fast;
      if (first_row + row >= box.rows.size || first_column + column >= box.columns.size) continue;
      std::byte* place = shared.elements + row * pitch(item) + column * item;
      uint32_t words[4] = {};
      if (kPhase == 0) {
        load_element(src + (first_row + row) * box.rows.src_stride + (first_column + column) * box.columns.src_stride,
                     box.conversion.src_bytes, box.src_alignment, words);
        convert(box, words);
        store_element(place, item, item, words);
      } else {
        load_element(place, item, item, words);
        store_element(dst + (first_row + row) * box.rows.dst_stride + (first_column + column) * box.columns.dst_stride,
                      item, box.dst_alignment, words);
      }
    }
  }
};

static_assert(sizeof(CopyKernel<false>) <= 4096);

}  // namespace weightlift

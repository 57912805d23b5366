// The kernels of the Marlin repack.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transform/cuda/access.h"
#include "transform/cuda/kernel.h"
#include "transform/marlin_layout.h"

namespace weightlift {

struct MarlinTask {
  const std::byte* src;  // of the first source row that is at hand
  int64_t src_row_stride;
  std::byte* dst;          // of the first tile to make
  int64_t dst_row_stride;  // from a row of tiles to the next
  const int32_t* perm;     // of the first row to make; null: in order
  // Of the source, from the first value that is at hand on. What lies beyond is zero.
  int64_t size_k;
  int64_t size_n;
  int64_t tile_rows;  // to make
  int64_t tile_columns;
  int32_t src_alignment;
  int32_t dst_alignment;
};

// A block brings a strip of neighbouring tiles into its memory as the source has them, 8 KiB whatever the layout, and
// writes words from there. kGathered: rows of k are those that perm names; kGptq only.
template <int kBits, bool kA8, PackedLayout kLayout, bool kGathered>
struct MarlinKernel : Kernel {
  using Tile = MarlinTile<kBits, kA8>;
  static constexpr int kPhases = 2;
  static constexpr int kMinBlocks = 4;
  static constexpr int kUnits = 512;                         // of 16 bytes, of a strip
  static constexpr int kTiles = 16 * kUnits / Tile::kBytes;  // of a strip
  static constexpr bool kAlongK = kLayout == PackedLayout::kNMajor;
  static constexpr int kValues = Tile::kValuesPerWord;
  static constexpr int kSourceRows = kAlongK                          ? Tile::kColumns
                                     : kLayout == PackedLayout::kGptq ? Tile::kPackedRows
                                                                      : Tile::kRows;  // of a strip
  static constexpr int kRowWords = 4 * kUnits / kSourceRows;
  static constexpr int kPitch = kRowWords + 4;  // so that rows begin in different banks

  struct Shared {
    alignas(16) uint32_t words[kSourceRows * kPitch];
  };

  MarlinTask task;

  int64_t tiles() const { return kAlongK ? strips(task.tile_rows) * task.tile_columns : task.tile_rows * across(); }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t strip, int thread, Thread&, Shared& shared) const {
    const int64_t down = strip / across();
    const int64_t tile_row = down * (kAlongK ? kTiles : 1);
    const int64_t tile_column = (strip - down * across()) * (kAlongK ? 1 : kTiles);
    WEIGHTLIFT_NO_UNROLL
    for (int i = 0; i < kUnits / kThreads; ++i) {
      const int unit = i * kThreads + thread;
      if constexpr (kPhase == 0) {
        load(tile_row, tile_column, unit, shared);
      } else {
        pack(tile_row, tile_column, unit, shared);
      }
    }
  }

 private:
  static WEIGHTLIFT_HOST_DEVICE int64_t strips(int64_t tiles) { return (tiles + kTiles - 1) / kTiles; }
  WEIGHTLIFT_HOST_DEVICE int64_t across() const { return kAlongK ? task.tile_columns : strips(task.tile_columns); }

  // Four words of the source.
  WEIGHTLIFT_HOST_DEVICE void load(int64_t tile_row, int64_t tile_column, int unit, Shared& shared) const {
    const int row = unit / (kRowWords / 4);
    const int word = unit % (kRowWords / 4) * 4;
    const int64_t k = tile_row * Tile::kRows;
    const int64_t n = tile_column * Tile::kColumns;
    uint32_t words[4];
    if constexpr (kGathered) {
      gather(k + row * kValues, n + word, words);
    } else if constexpr (kLayout == PackedLayout::kGptq) {
      load_words(k / kValues + row, task.size_k / kValues, n + word, task.size_n, words);
    } else if constexpr (kLayout == PackedLayout::kAwq) {
      load_words(k + row, task.size_k, n / kValues + word, task.size_n / kValues, words);
    } else {
      load_words(n + row, task.size_n, k / kValues + word, task.size_k / kValues, words);
    }
    store16(reinterpret_cast<std::byte*>(shared.words + row * kPitch + word), 16, words);
  }

  WEIGHTLIFT_HOST_DEVICE void load_words(int64_t row, int64_t rows, int64_t word, int64_t row_words,
                                         uint32_t (&words)[4]) const {
    load_up_to(task.src + row * task.src_row_stride + 4 * word, task.src_alignment,
               row < rows ? 4 * (row_words - word) : 0, words);
  }

  // The words of four columns, of the values of k, k + 1, ... of the result. An entry of perm that names no row gives
  // zeros.
  WEIGHTLIFT_HOST_DEVICE void gather(int64_t k, int64_t n, uint32_t (&words)[4]) const {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = 0;
    if (n >= task.size_n) return;  // whole units lie beyond: columns are multiples of a tile's
    WEIGHTLIFT_UNROLL
    for (int value = 0; value < kValues; ++value) {
      const int64_t from = task.perm[k + value];
      if (from < 0 || from >= task.size_k) continue;
      uint32_t packed[4];
      load16(task.src + from / kValues * task.src_row_stride + 4 * n, task.src_alignment, packed);
      const int shift = static_cast<int>(from % kValues) * kBits;
      WEIGHTLIFT_UNROLL
      for (int i = 0; i < 4; ++i) words[i] |= (packed[i] >> shift & ((1u << kBits) - 1)) << (kBits * value);
    }
  }

  // Four words of a tile.
  WEIGHTLIFT_HOST_DEVICE void pack(int64_t tile_row, int64_t tile_column, int unit, const Shared& shared) const {
    constexpr int kUnitsOfTile = Tile::kWords / 4;
    const int tile = unit / kUnitsOfTile;
    const int first = unit % kUnitsOfTile * 4;
    const int strip_k = kAlongK ? tile * Tile::kRows : 0;
    const int strip_n = kAlongK ? 0 : tile * Tile::kColumns;
    tile_row += kAlongK ? tile : 0;
    tile_column += kAlongK ? 0 : tile;
    if (tile_row >= task.tile_rows || tile_column >= task.tile_columns) return;
    const auto word_at = [&](int64_t row, int64_t column) { return shared.words[row * kPitch + column]; };
    uint32_t words[4];
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) {
      words[i] = Tile::pack(
          first + i, [&](int k, int n) { return packed_value<kBits, kLayout>(word_at, strip_k + k, strip_n + n); });
    }
    store16(task.dst + tile_row * task.dst_row_stride + tile_column * Tile::kBytes + 4 * first, task.dst_alignment,
            words);
  }
};

}  // namespace weightlift

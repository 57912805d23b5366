// Where the Marlin kernels want their quantised values, one definition for the host and for CUDA.
//
// Values of 4 or 8 bits form a matrix of `k` (input) by `n` (output). Marlin cuts it into tiles of 1024 values, each
// the words that the threads of one warp load: 16 (k) x 64 (n), or 32 x 32 where the activations have 8 bits. The words
// of a tile lie together; tiles that share their k lie in a row. Checkpoints hold the values in one of three ways.
#pragma once

#include <cstdint>

#include "transform/cast.h"

namespace weightlift {

enum class PackedLayout : uint8_t {
  kGptq,    // word (k / values, n), lowest bits first: packed along k, n runs along a row
  kAwq,     // word (k, n / values): packed along n, interleaved (awq_position)
  kNMajor,  // word (n, k / values), lowest bits first: packed along k, k runs along a row. FP8, FP4, compressed-tensors
};

// One word of a tile: `kBits` 4 or 8; `k8BitActivations`: the layout for them.
template <int kBits, bool k8BitActivations>
struct MarlinTile {
  static constexpr int kValuesPerWord = 32 / kBits;
  static constexpr int kRows = k8BitActivations ? 32 : 16;     // values along k
  static constexpr int kColumns = k8BitActivations ? 32 : 64;  // values along n
  static constexpr int kWords = 1024 / kValuesPerWord;
  static constexpr int kBytes = 4 * kWords;
  static constexpr int kPackedRows = kRows / kValuesPerWord;  // rows of words in the GPTQ layout

  struct Place {
    int k;
    int n;
  };

  // The value that stands at bits [kBits * position, + kBits) of a word. A thread (`lane`) has values from four columns
  // in turn (`column`), eight of each: two of them in an 8-bit word pair, one in a 4-bit word.
  WEIGHTLIFT_HOST_DEVICE static constexpr Place place(int word, int position) {
    const int lane = kBits == 4 ? word / 4 : word / 8;
    const int column = kBits == 4 ? word % 4 : word / 2 % 4;
    int value = 0;  // of the eight
    if (kBits == 4) {
      value = k8BitActivations ? position / 2 + 4 * (position % 2) : position % 4 * 2 + position / 4;
    } else {
      value = word % 2 * 4 + (k8BitActivations ? position : position % 2 * 2 + position / 2);
    }
    const int first = value % 4;
    if (k8BitActivations) return {lane % 4 * 4 + first + value / 4 * 16, column * 8 + lane / 4};
    return {lane % 4 * 2 + first % 2 + first / 2 * 8, column * 16 + lane / 4 + value / 4 * 8};
  }

  // A word of a tile. `value(k, n)`: a value of the tile, counted from its corner.
  template <typename Value>
  WEIGHTLIFT_HOST_DEVICE static uint32_t pack(int word, const Value& value) {
    uint32_t packed = 0;
    for (int position = 0; position < kValuesPerWord; ++position) {
      const Place at = place(word, position);
      packed |= value(at.k, at.n) << (kBits * position);
    }
    return packed;
  }
};

// AWQ: where in its word the value of column n stands, in units of a value.
template <int kBits>
WEIGHTLIFT_HOST_DEVICE constexpr int awq_position(int column) {
  // Columns 0 2 4 6 1 3 5 7 from the lowest bits up; 0 2 1 3 where there are four.
  constexpr int kHalf = 16 / kBits;
  return column % 2 * kHalf + column % (2 * kHalf) / 2;
}

// One value of a checkpoint. `word(row, column)`: a word of the source.
template <int kBits, PackedLayout kLayout, typename Word>
WEIGHTLIFT_HOST_DEVICE uint32_t packed_value(const Word& word, int64_t k, int64_t n) {
  constexpr int kValues = 32 / kBits;
  const int64_t packed_k = k / kValues;
  const auto in_word = [](uint32_t packed, int position) { return packed >> (kBits * position) & ((1u << kBits) - 1); };
  if constexpr (kLayout == PackedLayout::kGptq) {
    return in_word(word(packed_k, n), static_cast<int>(k % kValues));
  } else if constexpr (kLayout == PackedLayout::kAwq) {
    return in_word(word(k, n / kValues), awq_position<kBits>(static_cast<int>(n % kValues)));
  } else {
    return in_word(word(n, packed_k), static_cast<int>(k % kValues));
  }
}

}  // namespace weightlift

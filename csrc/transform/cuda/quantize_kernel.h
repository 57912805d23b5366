// The kernels of quantising: with scales that are found in each block of the matrix, with scales that lie in device
// memory, and the search for the largest magnitude alone.
//
// A unit is up to 16 elements beside each other, of one block: what becomes one access of 16 bytes.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "transform/cuda/access.h"
#include "transform/cuda/kernel.h"
#include "transform/cuda/numbers.h"
#include "transform/element.h"
#include "transform/quantize_rules.h"

namespace weightlift {

inline constexpr int kUnitElements = 16;

// The source of an op, from its first row that is at hand on.
struct FloatMatrix {
  const std::byte* data;
  int64_t row_stride;
  int64_t rows;
  int64_t columns;
  int32_t alignment;
};

// What happens to a number once its scale is known. See Quantize.
struct Quantizing {
  std::byte* weight;  // of the first row; null: only scales are wanted
  int64_t weight_stride;
  ScaleRule rule;
  uint32_t limit_bits;
  Scaling scaling;
  uint8_t nan;
  bool zero_is_infinite;
  int8_t weight_alignment;
};

// ---- elements in registers

template <ElementType kSource>
struct Units {
  using Word = std::conditional_t<kSource == ElementType::kFloat32, uint32_t, uint16_t>;
  static constexpr int kItem = sizeof(Word);
  static constexpr int kWords = kUnitElements * kItem / 4;
  static constexpr Word kInfinity = kSource == ElementType::kFloat32   ? 0x7f800000
                                    : kSource == ElementType::kFloat16 ? 0x7c00
                                                                       : 0x7f80;

  static WEIGHTLIFT_HOST_DEVICE uint32_t to_float32(Word word) {
    if constexpr (kSource == ElementType::kFloat32) return word;
    if constexpr (kSource == ElementType::kFloat16) return float16_to_float32(word);
    return bfloat16_to_float32(word);
  }

  // `count` elements, 1 to 16; zeros behind them.
  static WEIGHTLIFT_HOST_DEVICE void load(const FloatMatrix& matrix, int64_t row, int64_t column, int64_t count,
                                          uint32_t (&words)[kWords]) {
    load_up_to(matrix.data + row * matrix.row_stride + column * kItem, matrix.alignment, count * kItem, words);
  }

  // The largest finite magnitude, as the bits of a float32. The bits of magnitudes are in the order of their values.
  static WEIGHTLIFT_HOST_DEVICE uint32_t amax(const uint32_t (&words)[kWords]) {
    Word largest = 0;
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < kUnitElements; ++i) {
      const auto magnitude = static_cast<Word>(number_at<Word>(words, i) & (static_cast<Word>(~Word{0}) >> 1));
      if (magnitude < kInfinity && magnitude > largest) largest = magnitude;
    }
    return to_float32(largest);
  }
};

// value / divisor, rounded to nearest, by the divisor's reciprocal: far fewer instructions than a division, as many
// numbers share a divisor. It is the quotient, bit for bit, from 2^-20 on and below 2^60: the first correction brings
// it within one place, and the second, by a remainder that is exact, rounds it (Markstein, "Computation of elementary
// functions on the IBM RISC System/6000 processor", 1990). What quantising makes of others is the same as of theirs:
// smaller ones stay smaller and become zero; larger ones, infinity and NaN stay what they are.
// REQUIRES: may_divide_by(divisor), reciprocal == 1 / divisor.
WEIGHTLIFT_HOST_DEVICE inline float divided(float value, float divisor, float reciprocal) {
  const float first = value * reciprocal;
  const float second = fmaf(fmaf(-first, divisor, value), reciprocal, first);
  const float third = fmaf(fmaf(-second, divisor, value), reciprocal, second);
  const uint32_t sign = internal::bits_from_float(first) & 0x80000000;  // the corrections lose that of zero
  const float exact = internal::float_from_bits((internal::bits_from_float(third) & 0x7fffffff) | sign);
  return fabsf(first) < 0x1p60f ? exact : first;
}
// Neither remainders nor reciprocals of these are subnormal.
WEIGHTLIFT_HOST_DEVICE inline bool may_divide_by(float divisor) {
  return fabsf(divisor) >= 0x1p-80f && fabsf(divisor) <= 0x1p100f;
}

// Four values in units of the scale to bytes.
template <QuantizedType kType>
WEIGHTLIFT_HOST_DEVICE uint32_t quantized4(const float (&scaled)[4], const Quantizing& quantizing) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // The instruction that does just this. Of NaN it makes 0x7f.
  if constexpr (kType == QuantizedType::kE4M3FN) {
    if (quantizing.limit_bits == internal::Fp8Traits<Fp8::kE4M3FN>::kCastLimit) {
      float values[4];
      WEIGHTLIFT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const bool becomes_limit = quantizing.nan != internal::Fp8Traits<Fp8::kE4M3FN>::kNan && scaled[i] != scaled[i];
        values[i] = becomes_limit ? 448.0f : scaled[i];
      }
      uint16_t low;
      uint16_t high;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(values[1]), "f"(values[0]));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(values[3]), "f"(values[2]));
      return uint32_t{low} | uint32_t{high} << 16;
    }
  }
#endif
  uint32_t word = 0;
  WEIGHTLIFT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = internal::bits_from_float(scaled[i]);
    word |= uint32_t{quantized<kType>(bits, quantizing.limit_bits, quantizing.nan)} << (8 * i);
  }
  return word;
}

template <ElementType kSource, QuantizedType kType>
WEIGHTLIFT_HOST_DEVICE void quantize_unit(const Quantizing& quantizing, const uint32_t (&words)[Units<kSource>::kWords],
                                          float factor, int64_t row, int64_t column, int64_t count) {
  using Source = Units<kSource>;
  uint32_t out[4];
  const auto quantize = [&](const auto& scale) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < 4; ++i) {
      float scaled[4];
      WEIGHTLIFT_UNROLL
      for (int j = 0; j < 4; ++j) {
        scaled[j] =
            scale(internal::float_from_bits(Source::to_float32(number_at<typename Source::Word>(words, 4 * i + j))));
      }
      out[i] = quantized4<kType>(scaled, quantizing);
    }
  };
  if (quantizing.scaling == Scaling::kMultiply) {
    quantize([&](float value) { return value * factor; });
  } else if (may_divide_by(factor)) {
    const float reciprocal = 1.0f / factor;
    quantize([&](float value) { return divided(value, factor, reciprocal); });
  } else {
    quantize([&](float value) { return value / factor; });
  }
  store_up_to(quantizing.weight + row * quantizing.weight_stride + column, quantizing.weight_alignment, count, out);
}

WEIGHTLIFT_HOST_DEVICE inline void store_scale(std::byte* row, int64_t block, bool as_e8m0, float scale) {
  const uint32_t bits = internal::bits_from_float(scale);
  if (as_e8m0) {
    row[block] = std::byte{float32_to_e8m0_up(bits)};
    return;
  }
  for (int i = 0; i < 4; ++i) row[4 * block + i] = static_cast<std::byte>(bits >> (8 * i));  // it may lie anywhere
}

// ---- scales found: a block of threads has a block of the matrix, or several beside each other

template <ElementType kSource, QuantizedType kType>
struct QuantizeFoundKernel : Kernel {
  using Source = Units<kSource>;
  static constexpr int kPhases = 4;
  static constexpr int kHeld = kSource == ElementType::kFloat32 ? 2 : 4;  // units that a thread keeps in registers
  static constexpr int kMaxBlocks = 512;                                  // of a tile

  struct Shared {
    uint32_t amaxes[kMaxBlocks];
    float factors[kMaxBlocks];
  };
  struct Thread {
    uint32_t words[kHeld][Source::kWords];
  };

  FloatMatrix source;
  Quantizing quantizing;
  std::byte* scales;  // of the first row of blocks; null: only the weight is wanted
  int64_t scales_stride;
  int64_t block_rows;
  int64_t block_columns;
  int64_t row_blocks;   // blocks beside each other
  int64_t tile_blocks;  // of a tile, at most
  Divisor block_units;  // units beside each other in a block
  Divisor tile_units;   // in a tile: those of its blocks
  bool e8m0_scales;

  int64_t across() const { return (row_blocks + tile_blocks - 1) / tile_blocks; }
  int64_t tiles() const { return (source.rows + block_rows - 1) / block_rows * across(); }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t tile, int thread, Thread& own, Shared& shared) const {
    const int64_t tiles_across = (row_blocks + tile_blocks - 1) / tile_blocks;
    const int64_t block_row = tile / tiles_across;
    const int64_t first_block = (tile - block_row * tiles_across) * tile_blocks;
    const int64_t blocks = row_blocks - first_block < tile_blocks ? row_blocks - first_block : tile_blocks;
    if constexpr (kPhase == 0) {
      for (int64_t block = thread; block < blocks; block += kThreads) shared.amaxes[block] = 0;
    } else if constexpr (kPhase == 1) {
      find(block_row, first_block, thread, own, shared);
    } else if constexpr (kPhase == 2) {
      for (int64_t block = thread; block < blocks; block += kThreads) {
        const float scale = scale_from_amax(quantizing.rule, internal::float_from_bits(shared.amaxes[block]));
        shared.factors[block] = scaling_factor(quantizing.scaling, scale, quantizing.zero_is_infinite);
        if (scales != nullptr) {
          store_scale(scales + block_row * scales_stride, first_block + block, e8m0_scales, scale);
        }
      }
    } else if (quantizing.weight != nullptr) {
      for_each_unit(block_row, first_block, thread, [&](int held, const Unit& unit) {
        if (held >= 0) return quantize(unit, own.words[held], shared);
        uint32_t words[Source::kWords];
        Source::load(source, unit.row, unit.column, unit.count, words);
        quantize(unit, words, shared);
      });
    }
  }

 private:
  struct Unit {
    int64_t row;
    int64_t column;
    int64_t count;
    uint32_t block;  // of the tile
  };

  // Calls visit(index, unit): the first kHeld with their index, the others with -1.
  template <typename Visit>
  WEIGHTLIFT_HOST_DEVICE void for_each_unit(int64_t block_row, int64_t first_block, int thread,
                                            const Visit& visit) const {
    const int64_t first_row = block_row * block_rows;
    const int64_t rows = source.rows - first_row < block_rows ? source.rows - first_row : block_rows;
    const auto units = static_cast<uint32_t>(rows * tile_units.value());
    const auto visit_unit = [&](int held, uint32_t index) {
      const uint32_t row = tile_units.divide(index);
      const uint32_t in_row = index - row * tile_units.value();
      const uint32_t block = block_units.divide(in_row);
      const int64_t in_block = int64_t{in_row - block * block_units.value()} * kUnitElements;
      const int64_t column = (first_block + block) * block_columns + in_block;
      int64_t count = block_columns - in_block < kUnitElements ? block_columns - in_block : kUnitElements;
      if (count > source.columns - column) count = source.columns - column;
      if (count > 0) visit(held, Unit{first_row + row, column, count, block});
    };
    WEIGHTLIFT_UNROLL
    for (int held = 0; held < kHeld; ++held) {
      const auto index = static_cast<uint32_t>(held * kThreads + thread);
      if (index < units) visit_unit(held, index);
    }
    for (uint32_t index = kHeld * kThreads + static_cast<uint32_t>(thread); index < units; index += kThreads) {
      visit_unit(-1, index);
    }
  }

  WEIGHTLIFT_HOST_DEVICE void find(int64_t block_row, int64_t first_block, int thread, Thread& own,
                                   Shared& shared) const {
    uint32_t largest = 0;
    for_each_unit(block_row, first_block, thread, [&](int held, const Unit& unit) {
      uint32_t words[Source::kWords];
      Source::load(source, unit.row, unit.column, unit.count, words);
      if (held >= 0) {
        WEIGHTLIFT_UNROLL
        for (int i = 0; i < Source::kWords; ++i) own.words[held][i] = words[i];
      }
      const uint32_t amax = Source::amax(words);
      if (tile_blocks == 1) {
        largest = amax > largest ? amax : largest;
      } else {
        raise_to(shared.amaxes + unit.block, amax);
      }
    });
    if (tile_blocks == 1) raise_together(shared.amaxes, largest, thread);
  }

  WEIGHTLIFT_HOST_DEVICE void quantize(const Unit& unit, const uint32_t (&words)[Source::kWords],
                                       const Shared& shared) const {
    quantize_unit<kSource, kType>(quantizing, words, shared.factors[unit.block], unit.row, unit.column, unit.count);
  }
};

// ---- scales given

template <ElementType kSource, QuantizedType kType>
struct QuantizeWithKernel : Kernel {
  static constexpr int kPhases = 1;
  static constexpr int kMinBlocks = 4;

  FloatMatrix source;
  Quantizing quantizing;
  const float* scales;  // of the blocks, row by row, from that of the whole matrix's first row on
  bool are_amaxes;      // the largest magnitudes instead, from which scales come by the rule
  int64_t first_row;    // of the source, in the whole matrix
  int64_t block_rows;
  int64_t block_columns;
  int64_t row_blocks;
  Divisor block_units;
  RowTiles tiles_of;

  int64_t tiles() const { return tiles_of.tiles(); }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t tile, int thread, Thread&, Shared&) const {
    tiles_of.visit(tile, thread, [&](int64_t row, int64_t unit) {
      // Only a matrix of one block has rows so long that a Divisor can't number their units.
      const int64_t block = row_blocks == 1 ? 0 : block_units.divide(static_cast<uint32_t>(unit));
      const int64_t in_block = (unit - block * block_units.value()) * kUnitElements;
      const int64_t column = block * block_columns + in_block;
      int64_t count = block_columns - in_block < kUnitElements ? block_columns - in_block : kUnitElements;
      if (count > source.columns - column) count = source.columns - column;
      if (count <= 0) return;
      float scale = scales[(first_row + row) / block_rows * row_blocks + block];
      if (are_amaxes) scale = scale_from_amax(quantizing.rule, scale);
      uint32_t words[Units<kSource>::kWords];
      Units<kSource>::load(source, row, column, count, words);
      quantize_unit<kSource, kType>(quantizing, words,
                                    scaling_factor(quantizing.scaling, scale, quantizing.zero_is_infinite), row, column,
                                    count);
    });
  }
};

// ---- the largest magnitude

// Raises a number in memory to the largest finite magnitude of a matrix.
template <ElementType kSource>
struct AmaxKernel : Kernel {
  static constexpr int kPreparations = 1;
  static constexpr int kPhases = 1;

  struct Shared {
    uint32_t amax;
  };

  FloatMatrix source;
  float* amax;  // zero, or above
  RowTiles tiles_of;

  int64_t tiles() const { return tiles_of.tiles(); }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void prepare(int thread, Shared& shared) const {
    if (thread == 0) shared.amax = 0;
  }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t tile, int thread, Thread&, Shared& shared) const {
    uint32_t largest = 0;
    tiles_of.visit(tile, thread, [&](int64_t row, int64_t unit) {
      const int64_t left = source.columns - unit * kUnitElements;
      uint32_t words[Units<kSource>::kWords];
      Units<kSource>::load(source, row, unit * kUnitElements, left < kUnitElements ? left : kUnitElements, words);
      const uint32_t found = Units<kSource>::amax(words);
      largest = found > largest ? found : largest;
    });
    raise_together(&shared.amax, largest, thread);
  }

  WEIGHTLIFT_HOST_DEVICE void finish(int thread, Shared& shared) const {
    if (thread == 0) raise_to(reinterpret_cast<uint32_t*>(amax), shared.amax);
  }
};

// Scales of blocks whose largest magnitudes are known.
struct ScalesKernel : Kernel {
  static constexpr int kPhases = 1;

  const float* amaxes;  // row by row of blocks
  std::byte* scales;
  int64_t scales_stride;
  int64_t row_blocks;
  ScaleRule rule;
  RowTiles tiles_of;  // rows of blocks, of blocks
  bool e8m0_scales;

  int64_t tiles() const { return tiles_of.tiles(); }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t tile, int thread, Thread&, Shared&) const {
    tiles_of.visit(tile, thread, [&](int64_t row, int64_t block) {
      store_scale(scales + row * scales_stride, block, e8m0_scales,
                  scale_from_amax(rule, amaxes[row * row_blocks + block]));
    });
  }
};

}  // namespace weightlift

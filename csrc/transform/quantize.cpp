#include "transform/quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "transform/cuda/launch.h"
#include "transform/cuda/quantize_kernel.h"
#include "transform/simd.h"

#if WEIGHTLIFT_X86
#include <immintrin.h>
#endif

namespace weightlift {
namespace {

template <typename Word>
WEIGHTLIFT_ALWAYS_INLINE Word load(const std::byte* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// ---- element formats of the source

struct Float32 {
  using Word = uint32_t;
  static constexpr Word kInfinity = internal::kInfinityBits;
  static WEIGHTLIFT_ALWAYS_INLINE uint32_t to_float32(Word word) { return word; }
};
struct Float16 {
  using Word = uint16_t;
  static constexpr Word kInfinity = 0x7c00;
  static WEIGHTLIFT_ALWAYS_INLINE uint32_t to_float32(Word word) { return float16_to_float32(word); }
};
struct BFloat16 {
  using Word = uint16_t;
  static constexpr Word kInfinity = 0x7f80;
  static WEIGHTLIFT_ALWAYS_INLINE uint32_t to_float32(Word word) { return bfloat16_to_float32(word); }
};

// ---- rows, which have blocks of columns beside each other, the last one perhaps narrower. There is nothing for
// AVX-512: compiled for it, or written for AVX2, they take the same time.

// Raises `amaxes`, one for each block, to the largest finite magnitude.
using AmaxRow = void (*)(const std::byte* src, int64_t columns, int64_t block_columns, float* amaxes);

struct Encoding {
  uint32_t limit_bits;
  uint8_t nan;
};
// `factors`: see scaling_factor(), one for each block.
using QuantizeRow = void (*)(const std::byte* src, std::byte* dst, int64_t columns, int64_t block_columns,
                             const float* factors, const Encoding& encoding);

template <typename Source>
WEIGHTLIFT_ALWAYS_INLINE float amax_of(const std::byte* src, int64_t count) {
  using Word = typename Source::Word;
  constexpr Word kMagnitude = static_cast<Word>(~Word{0}) >> 1;
  Word largest = 0;  // the bits of magnitudes are in the order of their values
  for (int64_t i = 0; i < count; ++i) {
    const Word magnitude = load<Word>(src + i * int64_t{sizeof(Word)}) & kMagnitude;
    const Word finite = magnitude & -Word{magnitude < Source::kInfinity};  // a mask: it is vectorised, a choice is not
    largest = finite > largest ? finite : largest;
  }
  return internal::float_from_bits(Source::to_float32(largest));
}

template <typename Source, QuantizedType kType, Scaling kScaling>
WEIGHTLIFT_ALWAYS_INLINE void quantize_block(const std::byte* __restrict src, std::byte* __restrict dst, int64_t count,
                                             float factor, uint32_t limit_bits, uint8_t nan) {
  using Word = typename Source::Word;
  for (int64_t i = 0; i < count; ++i) {
    const float value = internal::float_from_bits(Source::to_float32(load<Word>(src + i * int64_t{sizeof(Word)})));
    const float scaled = kScaling == Scaling::kMultiply ? value * factor : value / factor;
    dst[i] = std::byte{quantized<kType>(internal::bits_from_float(scaled), limit_bits, nan)};
  }
}

#if WEIGHTLIFT_X86

// The same for AVX2, in less than half the time of what the compiler makes of it: signs are put on bytes, not on words,
// and NaN is looked for in 32 values at once.

template <typename Source>
WEIGHTLIFT_TARGET_AVX2 inline __m256 load8(const std::byte* src) {
  if constexpr (std::is_same_v<Source, Float32>) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(src));
  } else {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
    if constexpr (std::is_same_v<Source, Float16>) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
}

WEIGHTLIFT_TARGET_AVX2 inline __m256i words8(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }

WEIGHTLIFT_TARGET_AVX2 inline __m256i add_floats(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}

// What quantized() makes of a magnitude: see there.
template <QuantizedType kType>
WEIGHTLIFT_TARGET_AVX2 inline __m256i quantized8(__m256i bits, __m256i limit) {
  const __m256i magnitude = _mm256_min_epu32(_mm256_and_si256(bits, words8(0x7fffffff)), limit);
  if constexpr (kType == QuantizedType::kInt8) {
    return _mm256_and_si256(add_floats(magnitude, words8(internal::bits_from_float(12582912.0f))), words8(0xff));
  } else {
    constexpr uint32_t kBias = kType == QuantizedType::kE4M3FN ? internal::Fp8Traits<Fp8::kE4M3FN>::kBias
                                                               : internal::Fp8Traits<Fp8::kE4M3FNUZ>::kBias;
    constexpr uint32_t kSmallestNormal = (128 - kBias) << 23;
    const __m256i power =
        _mm256_and_si256(_mm256_max_epu32(magnitude, words8(kSmallestNormal)), words8(internal::kInfinityBits));
    const __m256i rounder = _mm256_add_epi32(power, words8(20 << 23));
    const __m256i places = _mm256_sub_epi32(add_floats(magnitude, rounder), rounder);
    return _mm256_add_epi32(places, _mm256_sub_epi32(_mm256_srli_epi32(power, 20), words8(kSmallestNormal >> 20)));
  }
}

template <typename Source, QuantizedType kType, Scaling kScaling>
WEIGHTLIFT_TARGET_AVX2 inline void quantize_block_avx2(const std::byte* src, std::byte* dst, int64_t count,
                                                       float factor, uint32_t limit_bits, uint8_t nan) {
  constexpr int64_t kItem = sizeof(typename Source::Word);
  const __m256 factors = _mm256_set1_ps(factor);
  const __m256i limit = words8(limit_bits);
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    __m256 values[4];
    __m256i bits[4];
    __m256i numbers[4];
    for (int k = 0; k < 4; ++k) {
      const __m256 value = load8<Source>(src + (i + 8 * k) * kItem);
      values[k] = kScaling == Scaling::kMultiply ? _mm256_mul_ps(value, factors) : _mm256_div_ps(value, factors);
      bits[k] = _mm256_castps_si256(values[k]);
      numbers[k] = quantized8<kType>(bits[k], limit);
    }
    const __m256 are_nan = _mm256_or_ps(_mm256_cmp_ps(values[0], values[1], _CMP_UNORD_Q),
                                        _mm256_cmp_ps(values[2], values[3], _CMP_UNORD_Q));
    if (_mm256_movemask_ps(are_nan) != 0) {
      quantize_block<Source, kType, kScaling>(src + i * kItem, dst + i, 32, factor, limit_bits, nan);
      continue;
    }
    // Packed with saturation, which keeps the signs.
    const __m256i number =
        _mm256_packus_epi16(_mm256_packus_epi32(numbers[0], numbers[1]), _mm256_packus_epi32(numbers[2], numbers[3]));
    const __m256i sign = _mm256_packs_epi16(_mm256_packs_epi32(bits[0], bits[1]), _mm256_packs_epi32(bits[2], bits[3]));
    __m256i bytes;
    if constexpr (kType == QuantizedType::kInt8) {
      bytes = _mm256_sign_epi8(number, _mm256_or_si256(sign, _mm256_set1_epi8(1)));
    } else {
      bytes = _mm256_or_si256(number, _mm256_and_si256(sign, _mm256_set1_epi8(static_cast<char>(0x80))));
      if constexpr (kType == QuantizedType::kE4M3FNUZ) {
        bytes = _mm256_andnot_si256(_mm256_cmpeq_epi8(number, _mm256_setzero_si256()), bytes);
      }
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_permutevar8x32_epi32(bytes, in_order));
  }
  quantize_block<Source, kType, kScaling>(src + i * kItem, dst + i, count - i, factor, limit_bits, nan);
}

#endif  // WEIGHTLIFT_X86

// Visits the blocks of a row: visit(index, first column, columns). Of the widths that formats use, the compiler knows.
template <typename Visit>
WEIGHTLIFT_ALWAYS_INLINE void for_each_block(int64_t columns, int64_t block_columns, const Visit& visit) {
  const int64_t whole = columns / block_columns;
  if (block_columns == 32) {
    for (int64_t i = 0; i < whole; ++i) visit(i, 32 * i, 32);
  } else if (block_columns == 128) {
    for (int64_t i = 0; i < whole; ++i) visit(i, 128 * i, 128);
  } else {
    for (int64_t i = 0; i < whole; ++i) visit(i, block_columns * i, block_columns);
  }
  if (whole * block_columns < columns) visit(whole, whole * block_columns, columns - whole * block_columns);
}

template <typename Source>
WEIGHTLIFT_ALWAYS_INLINE void amax_body(const std::byte* src, int64_t columns, int64_t block_columns, float* amaxes) {
  for_each_block(columns, block_columns,
                 [&](int64_t block, int64_t column, int64_t count) __attribute__((always_inline)) {
                   const float amax = amax_of<Source>(src + column * int64_t{sizeof(typename Source::Word)}, count);
                   amaxes[block] = amax > amaxes[block] ? amax : amaxes[block];
                 });
}

template <typename Source, QuantizedType kType, Scaling kScaling>
WEIGHTLIFT_ALWAYS_INLINE void quantize_body(const std::byte* src, std::byte* dst, int64_t columns,
                                            int64_t block_columns, const float* factors, const Encoding& encoding) {
  const uint32_t limit_bits = encoding.limit_bits;
  const uint8_t nan = encoding.nan;
  for_each_block(columns, block_columns,
                 [&](int64_t block, int64_t column, int64_t count) __attribute__((always_inline)) {
                   quantize_block<Source, kType, kScaling>(src + column * int64_t{sizeof(typename Source::Word)},
                                                           dst + column, count, factors[block], limit_bits, nan);
                 });
}

template <Simd kSimd>
struct Rows {
  template <typename Source>
  static void amax(const std::byte* src, int64_t columns, int64_t block_columns, float* amaxes) {
    amax_body<Source>(src, columns, block_columns, amaxes);
  }
  template <typename Source, QuantizedType kType, Scaling kScaling>
  static void quantize(const std::byte* src, std::byte* dst, int64_t columns, int64_t block_columns,
                       const float* factors, const Encoding& encoding) {
    quantize_body<Source, kType, kScaling>(src, dst, columns, block_columns, factors, encoding);
  }
};

#if WEIGHTLIFT_X86
template <>
struct Rows<Simd::kAvx2> {
  template <typename Source>
  WEIGHTLIFT_TARGET_AVX2 static void amax(const std::byte* src, int64_t columns, int64_t block_columns, float* amaxes) {
    amax_body<Source>(src, columns, block_columns, amaxes);
  }
  template <typename Source, QuantizedType kType, Scaling kScaling>
  WEIGHTLIFT_TARGET_AVX2 static void quantize(const std::byte* src, std::byte* dst, int64_t columns,
                                              int64_t block_columns, const float* factors, const Encoding& encoding) {
    for_each_block(columns, block_columns, [&](int64_t block, int64_t column, int64_t count) WEIGHTLIFT_TARGET_AVX2 {
      quantize_block_avx2<Source, kType, kScaling>(src + column * int64_t{sizeof(typename Source::Word)}, dst + column,
                                                   count, factors[block], encoding.limit_bits, encoding.nan);
    });
  }
};
#endif  // WEIGHTLIFT_X86

struct RowFunctions {
  AmaxRow amax;
  QuantizeRow quantize;
};

template <Simd kSimd, typename Source, QuantizedType kType>
RowFunctions row_functions(Scaling scaling) {
  return {Rows<kSimd>::template amax<Source>, scaling == Scaling::kMultiply
                                                  ? Rows<kSimd>::template quantize<Source, kType, Scaling::kMultiply>
                                                  : Rows<kSimd>::template quantize<Source, kType, Scaling::kDivide>};
}

template <Simd kSimd, typename Source>
RowFunctions row_functions(QuantizedType type, Scaling scaling) {
  switch (type) {
    case QuantizedType::kE4M3FN:
      return row_functions<kSimd, Source, QuantizedType::kE4M3FN>(scaling);
    case QuantizedType::kE4M3FNUZ:
      return row_functions<kSimd, Source, QuantizedType::kE4M3FNUZ>(scaling);
    default:
      return row_functions<kSimd, Source, QuantizedType::kInt8>(scaling);
  }
}

template <Simd kSimd>
RowFunctions row_functions(ElementType src_type, QuantizedType type, Scaling scaling) {
  switch (src_type) {
    case ElementType::kFloat32:
      return row_functions<kSimd, Float32>(type, scaling);
    case ElementType::kFloat16:
      return row_functions<kSimd, Float16>(type, scaling);
    case ElementType::kBFloat16:
      return row_functions<kSimd, BFloat16>(type, scaling);
    default:
      throw std::invalid_argument("only float32, float16 and bfloat16 are quantised");
  }
}

RowFunctions row_functions_for(ElementType src_type, QuantizedType type, Scaling scaling) {
#if WEIGHTLIFT_X86
  if (simd() >= Simd::kAvx2) return row_functions<Simd::kAvx2>(src_type, type, scaling);
#endif
  return row_functions<Simd::kBaseline>(src_type, type, scaling);
}

// ---- launching

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls launch.operator()<source type>().
template <typename Launch>
int for_source(ElementType src_type, const Launch& launch) {
  switch (src_type) {
    case ElementType::kFloat32:
      return launch.template operator()<ElementType::kFloat32>();
    case ElementType::kFloat16:
      return launch.template operator()<ElementType::kFloat16>();
    default:
      return launch.template operator()<ElementType::kBFloat16>();
  }
}

// Calls launch.operator()<source type, quantised type>().
template <typename Launch>
int for_types(ElementType src_type, QuantizedType type, const Launch& launch) {
  return for_source(src_type, [&]<ElementType kSource>() {
    switch (type) {
      case QuantizedType::kE4M3FN:
        return launch.template operator()<kSource, QuantizedType::kE4M3FN>();
      case QuantizedType::kE4M3FNUZ:
        return launch.template operator()<kSource, QuantizedType::kE4M3FNUZ>();
      default:
        return launch.template operator()<kSource, QuantizedType::kInt8>();
    }
  });
}

// Units of 16 columns that don't share a block.
int64_t units_of(int64_t columns) { return ceil_div(columns, kUnitElements); }

int launch_amax(ElementType src_type, FloatMatrix source, float* amax, DeviceStream stream) {
  if (source.row_stride == source.columns * element_bytes(src_type)) {
    source.columns *= source.rows;
    source.rows = 1;
  }
  source.alignment = alignment_of({address_of(source.data), source.rows == 1 ? 0 : source.row_stride});
  return for_source(src_type, [&]<ElementType kSource>() {
    AmaxKernel<kSource> kernel;
    kernel.source = source;
    kernel.amax = amax;
    kernel.tiles_of = RowTiles(source.rows, units_of(source.columns));
    return weightlift::launch(kernel, stream);
  });
}

// ---- ops

class QuantizeOp : public Op {
 public:
  const char* name() const override { return "quantize"; }

 protected:
  QuantizeOp(const Quantize& quantize, OpSource source, std::vector<OpOutput> outputs, OpOutput weight)
      : Op(source, std::move(outputs)),
        quantize_(quantize),
        weight_(weight),
        item_bytes_(element_bytes(quantize.src_type)),
        functions_(row_functions_for(quantize.src_type, quantize.type, quantize.scaling)),
        encoding_{internal::bits_from_float(quantize.limit),
                  quantized_nan(quantize.type, internal::bits_from_float(quantize.limit), quantize.keep_nan)} {}

  float factor(float scale) const { return scaling_factor(quantize_.scaling, scale, !quantize_.keep_nan); }

  // Columns [column, + columns) of a row; `src` points at the first of them.
  void quantize_row(const std::byte* src, int64_t row, int64_t column, int64_t columns, const float* factors) const {
    functions_.quantize(src, weight_.data + row * weight_.row_stride + column, columns, quantize_.block_columns,
                        factors, encoding_);
  }

  // Rows from `first_row` on, and what becomes of them. Units begin at multiples of a block, and of 16 in it.
  FloatMatrix source_of(const std::byte* src, int64_t src_row_stride, int64_t num_rows) const {
    const int64_t block_bytes = quantize_.block_columns * item_bytes_;
    return {src, src_row_stride, num_rows, quantize_.columns,
            alignment_of({address_of(src), num_rows == 1 ? 0 : src_row_stride, row_blocks() == 1 ? 0 : block_bytes})};
  }
  Quantizing quantizing_of(int64_t first_row, int64_t num_rows, const ScaleRule& rule) const {
    std::byte* weight = weight_.data == nullptr ? nullptr : weight_.data + first_row * weight_.row_stride;
    return {weight,
            weight_.row_stride,
            rule,
            encoding_.limit_bits,
            quantize_.scaling,
            encoding_.nan,
            !quantize_.keep_nan,
            static_cast<int8_t>(alignment_of({address_of(weight), num_rows == 1 ? 0 : weight_.row_stride,
                                              row_blocks() == 1 ? 0 : quantize_.block_columns}))};
  }

  int64_t row_blocks() const { return ceil_div(quantize_.columns, quantize_.block_columns); }

  // With scales, or largest magnitudes, in device memory.
  int launch_with(FloatMatrix source, const Quantizing& quantizing, int64_t first_row, const float* scales,
                  bool are_amaxes, DeviceStream stream) const {
    Quantizing to = quantizing;
    if (row_blocks() == 1 && quantize_.block_rows >= quantize_.rows && source.rows > 1 &&
        source.row_stride == source.columns * item_bytes_ && to.weight_stride == source.columns) {
      source.columns *= source.rows;
      source.rows = 1;
      source.alignment = alignment_of({address_of(source.data)});
      to.weight_alignment = static_cast<int8_t>(alignment_of({address_of(to.weight)}));
    }
    return for_types(quantize_.src_type, quantize_.type, [&]<ElementType kSource, QuantizedType kType>() {
      QuantizeWithKernel<kSource, kType> kernel;
      kernel.source = source;
      kernel.quantizing = to;
      kernel.scales = scales;
      kernel.are_amaxes = are_amaxes;
      kernel.first_row = first_row;
      kernel.block_rows = quantize_.block_rows;
      kernel.block_columns = std::max(quantize_.block_columns, row_blocks() == 1 ? source.columns : 0);
      kernel.row_blocks = row_blocks();
      kernel.block_units = Divisor(row_blocks() == 1 ? 1 : units_of(quantize_.block_columns));
      kernel.tiles_of = RowTiles(
          source.rows, row_blocks() == 1 ? units_of(source.columns) : row_blocks() * units_of(quantize_.block_columns));
      return weightlift::launch(kernel, stream);
    });
  }

  const Quantize quantize_;
  const OpOutput weight_;
  const int64_t item_bytes_;
  const RowFunctions functions_;
  const Encoding encoding_;
};

class QuantizeFound final : public QuantizeOp {
 public:
  QuantizeFound(const Quantize& quantize, const ScaleRule& rule, bool e8m0_scales, OpOutput weight, OpOutput scales,
                float* device_amaxes)
      : QuantizeOp(quantize,
                   {quantize.rows, quantize.columns * element_bytes(quantize.src_type),
                    std::min(quantize.block_rows, quantize.rows)},
                   present({weight, scales}), weight),
        scales_(scales),
        rule_(rule),
        e8m0_scales_(e8m0_scales),
        device_amaxes_(device_amaxes) {}

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    // Whole blocks, as many as stay in a cache from the search for their largest magnitudes until they are quantised.
    constexpr int64_t kStripeBytes = 256 << 10;
    const int64_t block_row_bytes = quantize_.block_columns * item_bytes_;
    const int64_t stripe_blocks = std::max<int64_t>(1, kStripeBytes / source().granule_rows / block_row_bytes);
    const int64_t stripe_columns = stripe_blocks * quantize_.block_columns;
    std::vector<float> factors(
        static_cast<size_t>(std::min(stripe_blocks, ceil_div(quantize_.columns, quantize_.block_columns))));

    for (int64_t row = first_row; row < first_row + num_rows; row += quantize_.block_rows) {
      const int64_t rows = std::min(quantize_.block_rows, first_row + num_rows - row);
      for (int64_t column = 0; column < quantize_.columns; column += stripe_columns) {
        const int64_t columns = std::min(stripe_columns, quantize_.columns - column);
        const std::byte* from = src + (row - first_row) * src_row_stride + column * item_bytes_;
        std::ranges::fill(factors, 0.0f);
        for (int64_t i = 0; i < rows; ++i) {
          functions_.amax(from + i * src_row_stride, columns, quantize_.block_columns, factors.data());
        }
        take_scales(row / quantize_.block_rows, column / quantize_.block_columns,
                    ceil_div(columns, quantize_.block_columns), factors.data());
        if (weight_.data == nullptr) continue;
        for (int64_t i = 0; i < rows; ++i) {
          quantize_row(from + i * src_row_stride, row + i, column, columns, factors.data());
        }
      }
    }
  }

  int launch(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows,
             DeviceStream stream) const override {
    FloatMatrix source = source_of(src, src_row_stride, num_rows);
    Quantizing quantizing = quantizing_of(first_row, num_rows, rule_);
    const int64_t block_row = first_row / quantize_.block_rows;
    std::byte* scales = scales_.data == nullptr ? nullptr : scales_.data + block_row * scales_.row_stride;
    if (device_amaxes_ != nullptr) return launch_by_steps(source, quantizing, first_row, scales, stream);

    int64_t row_blocks = this->row_blocks();
    const int64_t scale_bytes = e8m0_scales_ ? 1 : 4;
    if (quantize_.block_rows == 1 && quantize_.columns % quantize_.block_columns == 0 &&
        src_row_stride == this->source().row_bytes &&
        (weight_.data == nullptr || weight_.row_stride == quantize_.columns) &&
        (scales_.data == nullptr || scales_.row_stride == row_blocks * scale_bytes)) {
      source.columns *= num_rows;  // one row, of all blocks
      source.rows = 1;
      row_blocks *= num_rows;
    }
    const int64_t block_units = units_of(std::min(quantize_.block_columns, quantize_.columns));
    const int64_t rows = std::min(quantize_.block_rows, source.rows);
    if (rows * block_units >= int64_t{1} << 31) return kDeviceNotSupported;  // needs device_amaxes
    return for_types(quantize_.src_type, quantize_.type, [&]<ElementType kSource, QuantizedType kType>() {
      using K = QuantizeFoundKernel<kSource, kType>;
      K kernel;
      kernel.source = source;
      kernel.quantizing = quantizing;
      kernel.scales = scales;
      kernel.scales_stride = scales_.row_stride;
      kernel.block_rows = rows;
      kernel.block_columns = quantize_.block_columns;
      kernel.row_blocks = row_blocks;
      kernel.tile_blocks = std::clamp<int64_t>(K::kHeld * kThreads / (rows * block_units), 1,
                                               std::min<int64_t>(K::kMaxBlocks, row_blocks));
      kernel.block_units = Divisor(block_units);
      kernel.tile_units = Divisor(block_units * kernel.tile_blocks);
      kernel.e8m0_scales = e8m0_scales_;
      return weightlift::launch(kernel, stream);
    });
  }

 private:
  // Largest magnitudes, scales, weight, one after the other, each by the whole GPU.
  int launch_by_steps(const FloatMatrix& source, const Quantizing& quantizing, int64_t first_row, std::byte* scales,
                      DeviceStream stream) const {
    const int64_t first_block_row = first_row / quantize_.block_rows;
    const int64_t block_rows = ceil_div(source.rows, quantize_.block_rows);
    float* amaxes = device_amaxes_ + first_block_row * row_blocks();
    int status = launch_zeros(amaxes, block_rows * row_blocks() * 4, stream);
    for (int64_t i = 0; i < block_rows && status == 0; ++i) {
      for (int64_t j = 0; j < row_blocks() && status == 0; ++j) {
        FloatMatrix block = source;
        block.data += i * quantize_.block_rows * source.row_stride + j * quantize_.block_columns * item_bytes_;
        block.rows = std::min(quantize_.block_rows, source.rows - i * quantize_.block_rows);
        block.columns = std::min(quantize_.block_columns, source.columns - j * quantize_.block_columns);
        status = launch_amax(quantize_.src_type, block, amaxes + i * row_blocks() + j, stream);
      }
    }
    if (status == 0 && scales != nullptr) {
      ScalesKernel kernel;
      kernel.amaxes = amaxes;
      kernel.scales = scales;
      kernel.scales_stride = scales_.row_stride;
      kernel.row_blocks = row_blocks();
      kernel.rule = rule_;
      kernel.tiles_of = RowTiles(block_rows, row_blocks());
      kernel.e8m0_scales = e8m0_scales_;
      status = weightlift::launch(kernel, stream);
    }
    if (status != 0 || quantizing.weight == nullptr) return status;
    return launch_with(source, quantizing, first_row, device_amaxes_, true, stream);
  }

  // Turns the largest magnitudes of blocks of one row into factors, and stores the scales.
  void take_scales(int64_t block_row, int64_t first_block, int64_t num_blocks, float* factors) const {
    std::byte* to = scales_.data + block_row * scales_.row_stride + first_block * (e8m0_scales_ ? 1 : 4);
    for (int64_t i = 0; i < num_blocks; ++i) {
      const float scale = scale_from_amax(rule_, factors[i]);
      factors[i] = factor(scale);
      if (scales_.data == nullptr) continue;
      if (e8m0_scales_) {
        to[i] = std::byte{float32_to_e8m0_up(internal::bits_from_float(scale))};
      } else {
        std::memcpy(to + 4 * i, &scale, sizeof(scale));
      }
    }
  }

  static std::vector<OpOutput> present(std::vector<OpOutput> outputs) {
    std::erase_if(outputs, [](const OpOutput& output) { return output.data == nullptr; });
    return outputs;
  }

  const OpOutput scales_;
  const ScaleRule rule_;
  const bool e8m0_scales_;
  float* const device_amaxes_;
};

class QuantizeWith final : public QuantizeOp {
 public:
  QuantizeWith(const Quantize& quantize, std::vector<float> scales, OpOutput weight)
      : QuantizeOp(quantize, {quantize.rows, quantize.columns * element_bytes(quantize.src_type), 1}, {weight}, weight),
        factors_(std::move(scales)) {
    for (float& scale : factors_) scale = factor(scale);
  }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const int64_t row_blocks = ceil_div(quantize_.columns, quantize_.block_columns);
    for (int64_t row = first_row; row < first_row + num_rows; ++row, src += src_row_stride) {
      quantize_row(src, row, 0, quantize_.columns, factors_.data() + row / quantize_.block_rows * row_blocks);
    }
  }

 private:
  std::vector<float> factors_;  // by block
};

class QuantizeWithReferred final : public QuantizeOp {
 public:
  QuantizeWithReferred(const Quantize& quantize, const float* scales, OpOutput weight)
      : QuantizeOp(quantize, {quantize.rows, quantize.columns * element_bytes(quantize.src_type), 1}, {weight}, weight),
        scales_(scales) {}

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    std::vector<float> factors(static_cast<size_t>(row_blocks()));
    for (int64_t row = first_row; row < first_row + num_rows; ++row, src += src_row_stride) {
      const float* scales = scales_ + row / quantize_.block_rows * row_blocks();
      std::transform(scales, scales + row_blocks(), factors.begin(), [this](float scale) { return factor(scale); });
      quantize_row(src, row, 0, quantize_.columns, factors.data());
    }
  }

  int launch(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows,
             DeviceStream stream) const override {
    return launch_with(source_of(src, src_row_stride, num_rows), quantizing_of(first_row, num_rows, {}), first_row,
                       scales_, false, stream);
  }

 private:
  const float* const scales_;
};

class AmaxOp final : public Op {
 public:
  AmaxOp(ElementType src_type, int64_t rows, int64_t columns, float* amax)
      : Op({rows, columns * element_bytes(src_type), 1}, {{reinterpret_cast<std::byte*>(amax), 1, 4, 4}}),
        src_type_(src_type),
        columns_(columns),
        amax_(amax),
        amax_row_(row_functions_for(src_type, QuantizedType::kInt8, Scaling::kMultiply).amax) {}

  const char* name() const override { return "amax"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t, int64_t num_rows) const override {
    float largest = 0;
    for (int64_t i = 0; i < num_rows; ++i) amax_row_(src + i * src_row_stride, columns_, columns_, &largest);
    // Relaxed: who waits for the op to have run on all granules sees the number with that.
    std::atomic_ref<float> shared(*amax_);
    float known = shared.load(std::memory_order_relaxed);
    while (known < largest && !shared.compare_exchange_weak(known, largest, std::memory_order_relaxed)) {
    }
  }

  int launch(const std::byte* src, int64_t src_row_stride, int64_t, int64_t num_rows,
             DeviceStream stream) const override {
    return launch_amax(src_type_, {src, src_row_stride, num_rows, columns_, 1}, amax_, stream);
  }

 private:
  const ElementType src_type_;
  const int64_t columns_;
  float* const amax_;
  const AmaxRow amax_row_;
};

void check(const Quantize& quantize, const OpOutput& weight) {
  if (quantize.rows <= 0 || quantize.columns <= 0 || quantize.block_rows <= 0 || quantize.block_columns <= 0) {
    throw std::invalid_argument("sizes must be positive");
  }
  if (weight.data != nullptr && (weight.num_rows != quantize.rows || weight.row_bytes != quantize.columns)) {
    throw std::invalid_argument("the weight's output has another size");
  }
}

}  // namespace

std::unique_ptr<const Op> make_quantize(const Quantize& quantize, const ScaleRule& rule, bool e8m0_scales,
                                        OpOutput weight, OpOutput scales, float* device_amaxes) {
  check(quantize, weight);
  if (weight.data == nullptr && scales.data == nullptr) throw std::invalid_argument("nothing to write");
  if (scales.data != nullptr &&
      (scales.num_rows != ceil_div(quantize.rows, quantize.block_rows) ||
       scales.row_bytes != ceil_div(quantize.columns, quantize.block_columns) * (e8m0_scales ? 1 : 4))) {
    throw std::invalid_argument("the scales' output has another size");
  }
  return std::make_unique<QuantizeFound>(quantize, rule, e8m0_scales, weight, scales, device_amaxes);
}

std::unique_ptr<const Op> make_quantize_with(const Quantize& quantize, std::vector<float> scales, OpOutput weight) {
  check(quantize, weight);
  if (static_cast<int64_t>(scales.size()) !=
      ceil_div(quantize.rows, quantize.block_rows) * ceil_div(quantize.columns, quantize.block_columns)) {
    throw std::invalid_argument("as many scales as blocks are needed");
  }
  return std::make_unique<QuantizeWith>(quantize, std::move(scales), weight);
}

std::unique_ptr<const Op> make_quantize_with(const Quantize& quantize, const float* scales, OpOutput weight) {
  check(quantize, weight);
  return std::make_unique<QuantizeWithReferred>(quantize, scales, weight);
}

std::unique_ptr<const Op> make_amax(ElementType src_type, int64_t rows, int64_t columns, float* amax) {
  if (rows <= 0 || columns <= 0) throw std::invalid_argument("sizes must be positive");
  return std::make_unique<AmaxOp>(src_type, rows, columns, amax);
}

}  // namespace weightlift

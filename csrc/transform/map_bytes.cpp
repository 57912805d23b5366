#include "transform/map_bytes.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "transform/simd.h"

#if WEIGHTLIFT_X86
#include <immintrin.h>
#endif

namespace weightlift {
namespace {

// What a table makes of the few bytes that it doesn't leave as they are: `byte` becomes `byte ^ change`. Unused ones
// change nothing.
struct Replacement {
  uint8_t byte;
  uint8_t change;
};
using Replacements = std::array<Replacement, 4>;

std::optional<Replacements> replacements_of(const ByteTable& table) {
  Replacements replacements{};
  size_t count = 0;
  for (size_t byte = 0; byte < table.size(); ++byte) {
    if (table[byte] == byte) continue;
    if (count == replacements.size()) return std::nullopt;
    replacements[count++] = {static_cast<uint8_t>(byte), static_cast<uint8_t>(byte ^ table[byte])};
  }
  return replacements;
}

struct Part;
using MapRow = void (*)(const std::byte* src, std::byte* dst, int64_t count, const Part& part);

struct Part {
  int64_t end_row;
  ByteTable table;
  Replacements replacements;  // of map_row_avx2_few
  MapRow map_row;
};

void map_row_scalar(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  for (int64_t i = 0; i < count; ++i) dst[i] = std::byte{part.table[static_cast<size_t>(src[i])]};
}

#if WEIGHTLIFT_X86

// From 2^kBits sixteenths of the table, each looked up by the low nibble, the one that the bits above it name.
template <int kBits>
WEIGHTLIFT_TARGET_AVX2 inline __m256i look_up(const __m256i* sixteenths, __m256i low_nibbles, __m256i bytes) {
  if constexpr (kBits == 0) {
    return _mm256_shuffle_epi8(*sixteenths, low_nibbles);
  } else {
    constexpr int kHalf = 1 << (kBits - 1);
    return _mm256_blendv_epi8(look_up<kBits - 1>(sixteenths, low_nibbles, bytes),
                              look_up<kBits - 1>(sixteenths + kHalf, low_nibbles, bytes),
                              _mm256_slli_epi16(bytes, 4 - kBits));  // it selects by a byte's highest bit
  }
}

WEIGHTLIFT_TARGET_AVX2 void map_row_avx2(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  __m256i sixteenths[16];
  for (int i = 0; i < 16; ++i) {
    sixteenths[i] =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part.table.data() + 16 * i)));
  }
  const __m256i low_nibble = _mm256_set1_epi8(0x0f);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i mapped = look_up<4>(sixteenths, _mm256_and_si256(bytes, low_nibble), bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), mapped);
  }
  map_row_scalar(src + i, dst + i, count - i, part);
}

// For a table with few replacements.
WEIGHTLIFT_TARGET_AVX2 void map_row_avx2_few(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  __m256i from[std::tuple_size_v<Replacements>];
  __m256i change[std::tuple_size_v<Replacements>];
  for (size_t k = 0; k < part.replacements.size(); ++k) {
    from[k] = _mm256_set1_epi8(static_cast<char>(part.replacements[k].byte));
    change[k] = _mm256_set1_epi8(static_cast<char>(part.replacements[k].change));
  }
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    __m256i mapped = bytes;
    for (size_t k = 0; k < part.replacements.size(); ++k) {
      mapped = _mm256_xor_si256(mapped, _mm256_and_si256(_mm256_cmpeq_epi8(bytes, from[k]), change[k]));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), mapped);
  }
  map_row_scalar(src + i, dst + i, count - i, part);
}

WEIGHTLIFT_TARGET_AVX512 void map_row_avx512(const std::byte* src, std::byte* dst, int64_t count, const Part& part) {
  const std::byte* table = reinterpret_cast<const std::byte*>(part.table.data());
  const __m512i quarters[4] = {_mm512_loadu_si512(table), _mm512_loadu_si512(table + 64),
                               _mm512_loadu_si512(table + 128), _mm512_loadu_si512(table + 192)};
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 present = count - i < 64 ? (uint64_t{1} << (count - i)) - 1 : ~uint64_t{0};
    const __m512i bytes = _mm512_maskz_loadu_epi8(present, src + i);
    const __m512i low = _mm512_permutex2var_epi8(quarters[0], bytes, quarters[1]);
    const __m512i high = _mm512_permutex2var_epi8(quarters[2], bytes, quarters[3]);
    _mm512_mask_storeu_epi8(dst + i, present, _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high));
  }
}

#endif  // WEIGHTLIFT_X86

Part part_of(const ByteMapPart& part) {
#if WEIGHTLIFT_X86
  if (simd() >= Simd::kAvx512) return {part.end_row, part.table, {}, map_row_avx512};
  if (simd() >= Simd::kAvx2) {
    const std::optional<Replacements> few = replacements_of(part.table);
    return {part.end_row, part.table, few.value_or(Replacements{}), few ? map_row_avx2_few : map_row_avx2};
  }
#endif
  return {part.end_row, part.table, {}, map_row_scalar};
}

template <typename Function>
ByteTable table_of(const Function& function) {
  ByteTable table;
  for (size_t byte = 0; byte < table.size(); ++byte) table[byte] = function(static_cast<uint8_t>(byte));
  return table;
}

class ByteMapOp final : public Op {
 public:
  ByteMapOp(const std::vector<ByteMapPart>& parts, OpSource source, OpOutput output) : Op(source, {output}) {
    std::ranges::transform(parts, std::back_inserter(parts_), part_of);
  }

  const char* name() const override { return "byte_map"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const OpOutput& output = outputs().front();
    auto part = std::ranges::upper_bound(parts_, first_row, {}, &Part::end_row);
    for (int64_t row = first_row; row < first_row + num_rows; ++row, src += src_row_stride) {
      while (part->end_row <= row) ++part;
      part->map_row(src, output.data + row * output.row_stride, source().row_bytes, *part);
    }
  }

 private:
  std::vector<Part> parts_;
};

}  // namespace

ByteTable e4m3fn_to_e4m3fnuz_table(bool keep_nan) {
  return table_of([=](uint8_t byte) { return e4m3fn_to_e4m3fnuz(byte, keep_nan); });
}

ByteTable requantize_table(Fp8 format, float scale, float new_scale, float limit, Rounding rounding) {
  if (rounding == Rounding::kExact && scale == new_scale) return table_of([](uint8_t byte) { return byte; });
  const uint32_t limit_bits = internal::bits_from_float(limit);
  const float inverse = 1.0f / new_scale;
  return table_of([=](uint8_t byte) {
    return format == Fp8::kE4M3FN ? requantize_fp8<Fp8::kE4M3FN>(byte, scale, inverse, limit_bits, rounding)
                                  : requantize_fp8<Fp8::kE4M3FNUZ>(byte, scale, inverse, limit_bits, rounding);
  });
}

std::unique_ptr<const Op> make_byte_map(const std::vector<ByteMapPart>& parts, int64_t row_bytes, OpOutput output) {
  int64_t end_row = 0;
  for (const ByteMapPart& part : parts) {
    if (part.end_row <= end_row) throw std::invalid_argument("the parts' rows must ascend");
    end_row = part.end_row;
  }
  if (end_row != output.num_rows || row_bytes != output.row_bytes) {
    throw std::invalid_argument("the output has another size than the source");
  }
  return std::make_unique<ByteMapOp>(parts, OpSource{end_row, row_bytes, 1}, output);
}

}  // namespace weightlift

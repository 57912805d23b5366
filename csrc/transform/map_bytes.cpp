#include "transform/map_bytes.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "transform/simd.h"

#if WEIGHTLIFT_X86
#include <immintrin.h>
#endif

namespace weightlift {
namespace {

using MapRow = void (*)(const std::byte* src, std::byte* dst, int64_t count, const ByteTable& table);

void map_row_scalar(const std::byte* src, std::byte* dst, int64_t count, const ByteTable& table) {
  for (int64_t i = 0; i < count; ++i) dst[i] = std::byte{table[static_cast<size_t>(src[i])]};
}

#if WEIGHTLIFT_X86

// A sixteenth of the table at a time: only bytes of that sixteenth keep an index below 128, all others select zero.
WEIGHTLIFT_TARGET_AVX2 void map_row_avx2(const std::byte* src, std::byte* dst, int64_t count, const ByteTable& table) {
  __m256i sixteenths[16];
  for (int i = 0; i < 16; ++i) {
    sixteenths[i] =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data() + 16 * i)));
  }
  const __m256i only_low_nibble = _mm256_set1_epi8(0x70);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    __m256i mapped = _mm256_setzero_si256();
    for (int part = 0; part < 16; ++part) {
      const __m256i index = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(part << 4)));
      mapped = _mm256_or_si256(mapped, _mm256_shuffle_epi8(sixteenths[part], _mm256_adds_epu8(index, only_low_nibble)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), mapped);
  }
  map_row_scalar(src + i, dst + i, count - i, table);
}

WEIGHTLIFT_TARGET_AVX512 void map_row_avx512(const std::byte* src, std::byte* dst, int64_t count,
                                             const ByteTable& table) {
  const __m512i quarters[4] = {_mm512_loadu_si512(table.data()), _mm512_loadu_si512(table.data() + 64),
                               _mm512_loadu_si512(table.data() + 128), _mm512_loadu_si512(table.data() + 192)};
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 present = count - i < 64 ? (uint64_t{1} << (count - i)) - 1 : ~uint64_t{0};
    const __m512i bytes = _mm512_maskz_loadu_epi8(present, src + i);
    const __m512i low = _mm512_permutex2var_epi8(quarters[0], bytes, quarters[1]);
    const __m512i high = _mm512_permutex2var_epi8(quarters[2], bytes, quarters[3]);
    _mm512_mask_storeu_epi8(dst + i, present, _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high));
  }
}

#endif  // WEIGHTLIFT_X86

MapRow map_row_for(Simd simd) {
#if WEIGHTLIFT_X86
  if (simd >= Simd::kAvx512) return map_row_avx512;
  if (simd >= Simd::kAvx2) return map_row_avx2;
#endif
  return map_row_scalar;
}

template <typename Function>
ByteTable table_of(const Function& function) {
  ByteTable table;
  for (size_t byte = 0; byte < table.size(); ++byte) table[byte] = function(static_cast<uint8_t>(byte));
  return table;
}

class ByteMapOp final : public Op {
 public:
  ByteMapOp(std::vector<ByteMapPart> parts, OpSource source, OpOutput output)
      : Op(source, {output}), parts_(std::move(parts)), map_row_(map_row_for(simd())) {}

  const char* name() const override { return "byte_map"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const OpOutput& output = outputs().front();
    auto part = std::ranges::upper_bound(parts_, first_row, {}, &ByteMapPart::end_row);
    for (int64_t row = first_row; row < first_row + num_rows; ++row, src += src_row_stride) {
      while (part->end_row <= row) ++part;
      map_row_(src, output.data + row * output.row_stride, source().row_bytes, part->table);
    }
  }

 private:
  const std::vector<ByteMapPart> parts_;
  const MapRow map_row_;
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

std::unique_ptr<const Op> make_byte_map(std::vector<ByteMapPart> parts, int64_t row_bytes, OpOutput output) {
  int64_t end_row = 0;
  for (const ByteMapPart& part : parts) {
    if (part.end_row <= end_row) throw std::invalid_argument("the parts' rows must ascend");
    end_row = part.end_row;
  }
  if (end_row != output.num_rows || row_bytes != output.row_bytes) {
    throw std::invalid_argument("the output has another size than the source");
  }
  return std::make_unique<ByteMapOp>(std::move(parts), OpSource{end_row, row_bytes, 1}, output);
}

}  // namespace weightlift

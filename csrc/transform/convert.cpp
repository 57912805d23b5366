#include "transform/convert.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "transform/cast.h"
#include "transform/fp8.h"
#include "transform/simd.h"

#if defined(WEIGHTLIFT_X86)
#include <immintrin.h>
#endif

namespace weightlift {
namespace {

using RowFunction = void (*)(const std::byte* src, std::byte* dst, int64_t count);

// Elements that are converted at a time where that takes two steps: what is in between stays in the L1 cache.
constexpr int64_t kPiece = 512;

template <typename Word>
Word load(const std::byte* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

template <typename Word>
void store(std::byte* to, Word word) {
  std::memcpy(to, &word, sizeof(word));
}

template <typename Src, typename Dst, Dst (*kConvert)(Src)>
void convert_row(const std::byte* __restrict src, std::byte* __restrict dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    store(dst + i * int64_t{sizeof(Dst)}, kConvert(load<Src>(src + i * int64_t{sizeof(Src)})));
  }
}

struct Bool {  // as it lies in memory
  uint8_t byte;
};

// C++'s own conversions between numbers: those of integers keep the low bits; those to float32 and float64 round to
// nearest even; what is not zero, NaN included, is true.
template <typename Src, typename Dst>
Dst cast_number(Src value) {
  if constexpr (std::is_same_v<Src, Bool>) {
    return static_cast<Dst>(value.byte != 0 ? 1 : 0);
  } else if constexpr (std::is_same_v<Dst, Bool>) {
    return {static_cast<uint8_t>(value != 0 ? 1 : 0)};
  } else {
    return static_cast<Dst>(value);
  }
}

template <typename Src, typename Dst>
constexpr RowFunction kCastNumbers = convert_row<Src, Dst, cast_number<Src, Dst>>;

using DecodeByte = uint32_t (*)(uint8_t);

template <DecodeByte kDecode>
void decode_bytes(const std::byte* src, std::byte* dst, int64_t count) {
  static const std::array<uint32_t, 256> values = [] {
    std::array<uint32_t, 256> made;
    for (int byte = 0; byte < 256; ++byte) made[static_cast<size_t>(byte)] = kDecode(static_cast<uint8_t>(byte));
    return made;
  }();
  for (int64_t i = 0; i < count; ++i) store(dst + 4 * i, values[static_cast<uint8_t>(src[i])]);
}

template <uint8_t (*kEncode)(uint32_t)>
constexpr RowFunction kEncodeBytes = convert_row<uint32_t, uint8_t, kEncode>;

#if defined(WEIGHTLIFT_X86)
// The conversion instructions treat every value, NaN included, as cast.h does.
WEIGHTLIFT_TARGET_AVX2 void float16_to_float32_row_avx2(const std::byte* src, std::byte* dst, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 2 * i));
    _mm256_storeu_ps(reinterpret_cast<float*>(dst + 4 * i), _mm256_cvtph_ps(halves));
  }
  convert_row<uint16_t, uint32_t, float16_to_float32>(src + 2 * i, dst + 4 * i, count - i);
}

WEIGHTLIFT_TARGET_AVX2 void float32_to_float16_row_avx2(const std::byte* src, std::byte* dst, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 floats = _mm256_loadu_ps(reinterpret_cast<const float*>(src + 4 * i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + 2 * i), _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
  }
  convert_row<uint32_t, uint16_t, float32_to_float16>(src + 4 * i, dst + 2 * i, count - i);
}
#endif

RowFunction float16_to_float32_row() {
#if defined(WEIGHTLIFT_X86)
  if (simd() >= Simd::kAvx2) return float16_to_float32_row_avx2;
#endif
  return convert_row<uint16_t, uint32_t, float16_to_float32>;
}

RowFunction float32_to_float16_row() {
#if defined(WEIGHTLIFT_X86)
  if (simd() >= Simd::kAvx2) return float32_to_float16_row_avx2;
#endif
  return convert_row<uint32_t, uint16_t, float32_to_float16>;
}

bool is_complex(ElementType type) { return type >= ElementType::kComplex32; }

bool is_integer(ElementType type) { return ElementType::kUInt8 <= type && type <= ElementType::kInt64; }

// Integers, or false and true, which are 0 and 1.
bool is_integral(ElementType type) { return is_integer(type) || type == ElementType::kBool; }

// Integers and bools to another type of numbers.
template <typename To>
RowFunction cast_integral(ElementType from) {
  using enum ElementType;
  switch (from) {
    case kBool:
      return kCastNumbers<Bool, To>;
    case kUInt8:
      return kCastNumbers<uint8_t, To>;
    case kInt8:
      return kCastNumbers<int8_t, To>;
    case kUInt16:
      return kCastNumbers<uint16_t, To>;
    case kInt16:
      return kCastNumbers<int16_t, To>;
    case kUInt32:
      return kCastNumbers<uint32_t, To>;
    case kInt32:
      return kCastNumbers<int32_t, To>;
    case kUInt64:
      return kCastNumbers<uint64_t, To>;
    default:
      return kCastNumbers<int64_t, To>;
  }
}

// To float32. Null for itself.
RowFunction decoder(ElementType from) {
  using enum ElementType;
  switch (from) {
    case kFloat32:
      return nullptr;
    case kFloat16:
      return float16_to_float32_row();
    case kBFloat16:
      return convert_row<uint16_t, uint32_t, bfloat16_to_float32>;
    case kFloat64:
      return kCastNumbers<double, float>;
    case kFloat8E4M3FN:
      return decode_bytes<fp8_to_float32<Fp8::kE4M3FN>>;
    case kFloat8E4M3FNUZ:
      return decode_bytes<fp8_to_float32<Fp8::kE4M3FNUZ>>;
    case kFloat8E5M2:
      return decode_bytes<fp8_to_float32<Fp8::kE5M2>>;
    case kFloat8E5M2FNUZ:
      return decode_bytes<fp8_to_float32<Fp8::kE5M2FNUZ>>;
    case kFloat8E8M0FNU:
      return decode_bytes<e8m0_to_float32>;
    default:
      return cast_integral<float>(from);
  }
}

// From float32. Null for itself.
RowFunction encoder(ElementType to) {
  using enum ElementType;
  switch (to) {
    case kFloat16:
      return float32_to_float16_row();
    case kBFloat16:
      return convert_row<uint32_t, uint16_t, float32_to_bfloat16>;
    case kFloat64:
      return kCastNumbers<float, double>;
    case kFloat8E4M3FN:
      return kEncodeBytes<float32_to_fp8<Fp8::kE4M3FN>>;
    case kFloat8E4M3FNUZ:
      return kEncodeBytes<float32_to_fp8<Fp8::kE4M3FNUZ>>;
    case kFloat8E5M2:
      return kEncodeBytes<float32_to_fp8<Fp8::kE5M2>>;
    case kFloat8E5M2FNUZ:
      return kEncodeBytes<float32_to_fp8<Fp8::kE5M2FNUZ>>;
    case kFloat8E8M0FNU:
      return kEncodeBytes<float32_to_e8m0>;
    case kBool:
      return kCastNumbers<float, Bool>;
    default:
      return nullptr;
  }
}

// From int64.
RowFunction integer_encoder(ElementType to) {
  if (to == ElementType::kBool) return kCastNumbers<int64_t, Bool>;
  switch (element_bytes(to)) {
    case 1:
      return kCastNumbers<int64_t, uint8_t>;
    case 2:
      return kCastNumbers<int64_t, uint16_t>;
    case 4:
      return kCastNumbers<int64_t, uint32_t>;
    default:
      return nullptr;
  }
}

}  // namespace

bool can_convert(ElementType src, ElementType dst) {
  if (src == dst) return true;
  if (std::min(src, dst) < ElementType::kFloat32) return false;
  if (is_integer(dst)) return is_integral(src);
  return !is_complex(src) || is_complex(dst) || dst == ElementType::kBool;
}

ElementType part_of(ElementType type) {
  using enum ElementType;
  return type == kComplex32 ? kFloat16 : type == kComplex64 ? kFloat32 : type == kComplex128 ? kFloat64 : type;
}

Through through(ElementType src, ElementType dst) {
  const ElementType from = part_of(src);
  const ElementType to = part_of(dst);
  if (src == dst || (from == to && from != ElementType::kFloat16)) return Through::kNothing;  // its NaN is made quiet
  if (is_integral(from) && is_integral(to)) return Through::kInt64;
  if (is_integral(from) && to == ElementType::kFloat64) return Through::kFloat64;
  if (from == ElementType::kFloat64 && to == ElementType::kBool) return Through::kBool;
  return Through::kFloat32;
}

Conversion::Conversion(ElementType src, ElementType dst)
    : src_(src), dst_(dst), src_part_bytes_(element_bytes(part_of(src))), dst_part_bytes_(element_bytes(part_of(dst))) {
  const ElementType from = part_of(src);
  const ElementType to = part_of(dst);
  switch (through(src, dst)) {
    case Through::kNothing:
      break;
    case Through::kFloat32:
      decode_ = decoder(from);
      encode_ = encoder(to);
      break;
    case Through::kInt64:
      decode_ = cast_integral<int64_t>(from);
      encode_ = integer_encoder(to);
      break;
    case Through::kFloat64:
      decode_ = cast_integral<double>(from);
      break;
    case Through::kBool:
      decode_ = kCastNumbers<double, Bool>;
      break;
  }
}

void Conversion::convert(const std::byte* src, std::byte* dst, int64_t count) const {
  if (is_complex(src_) == is_complex(dst_)) return convert_numbers(src, dst, is_complex(src_) ? 2 * count : count);
  const int64_t src_bytes = element_bytes(src_);
  const int64_t dst_bytes = element_bytes(dst_);
  std::byte parts[2 * kPiece * sizeof(double)];
  for (int64_t done = 0; done < count; done += kPiece) {
    const int64_t n = std::min(kPiece, count - done);
    std::byte* to = dst + done * dst_bytes;
    if (is_complex(src_)) {  // to bool: true where either part is
      convert_numbers(src + done * src_bytes, parts, 2 * n);
      for (int64_t i = 0; i < n; ++i) to[i] = parts[2 * i] | parts[2 * i + 1];
    } else {  // the imaginary part is 0
      convert_numbers(src + done * src_bytes, parts, n);
      std::memset(to, 0, static_cast<size_t>(n * dst_bytes));
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(to + i * dst_bytes, parts + i * dst_part_bytes_, static_cast<size_t>(dst_part_bytes_));
      }
    }
  }
}

void Conversion::convert_numbers(const std::byte* src, std::byte* dst, int64_t count) const {
  if (decode_ == nullptr && encode_ == nullptr) {
    std::memcpy(dst, src, static_cast<size_t>(count * src_part_bytes_));
  } else if (decode_ == nullptr || encode_ == nullptr) {
    (decode_ != nullptr ? decode_ : encode_)(src, dst, count);
  } else {
    std::byte between[kPiece * sizeof(int64_t)];
    for (int64_t done = 0; done < count; done += kPiece) {
      const int64_t n = std::min(kPiece, count - done);
      decode_(src + done * src_part_bytes_, between, n);
      encode_(between, dst + done * dst_part_bytes_, n);
    }
  }
}

}  // namespace weightlift

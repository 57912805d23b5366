// The 8-bit floats, one definition for the host and for CUDA: bytes and the bits of float32 in, bytes out.
//
//   e4m3fn    bias 7, no infinity; NaN is 0x7f and 0xff; the largest number is 448
//   e4m3fnuz  bias 8, no infinity, no negative zero; NaN is 0x80; the largest number is 240
//   e5m2      bias 15, the upper half of a float16: infinity is 0x7c and 0xfc, what lies behind it is NaN
//   e5m2fnuz  bias 16, no infinity, no negative zero; NaN is 0x80; the largest number is 57344
//   e8m0      a power of two, 2^(byte - 127); 0xff is NaN
#pragma once

#include <cstdint>

#include "transform/cast.h"

namespace weightlift {

enum class Fp8 : uint8_t { kE4M3FN, kE4M3FNUZ, kE5M2, kE5M2FNUZ };

namespace internal {

constexpr uint32_t kInfinityBits = 0x7f800000;

template <Fp8 kFormat>
struct Fp8Traits;
template <>
struct Fp8Traits<Fp8::kE4M3FN> {
  static constexpr uint32_t kBias = 7;
  static constexpr uint32_t kFractionBits = 3;
  static constexpr uint32_t kNan = 0x7f;              // with either sign
  static constexpr uint32_t kCastLimit = 0x43e00000;  // 448, which torch's casts stop at
};
template <>
struct Fp8Traits<Fp8::kE4M3FNUZ> {
  static constexpr uint32_t kBias = 8;
  static constexpr uint32_t kFractionBits = 3;
  static constexpr uint32_t kNan = 0x80;              // there is one
  static constexpr uint32_t kCastLimit = 0x43800000;  // 256: the first power of two that is too large would be 0x80
};
template <>
struct Fp8Traits<Fp8::kE5M2> {
  static constexpr uint32_t kBias = 15;
  static constexpr uint32_t kFractionBits = 2;
  static constexpr uint32_t kNan = 0x7f;              // the one that torch makes
  static constexpr uint32_t kCastLimit = 0x47800000;  // 65536, which would be 0x7c: infinity
};
template <>
struct Fp8Traits<Fp8::kE5M2FNUZ> {
  static constexpr uint32_t kBias = 16;
  static constexpr uint32_t kFractionBits = 2;
  static constexpr uint32_t kNan = 0x80;
  static constexpr uint32_t kCastLimit = 0x47800000;  // 65536, which would be 0x80
};

template <Fp8 kFormat>
inline constexpr bool kIsFnuz = kFormat == Fp8::kE4M3FNUZ || kFormat == Fp8::kE5M2FNUZ;

}  // namespace internal

// The value of a byte, as the bits of a float32. Exact. NaN has the bits that torch gives it.
template <Fp8 kFormat>
WEIGHTLIFT_HOST_DEVICE inline uint32_t fp8_to_float32(uint8_t byte) {
  using Traits = internal::Fp8Traits<kFormat>;
  if (kFormat == Fp8::kE5M2) return float16_to_float32(static_cast<uint16_t>(byte << 8));
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80) << 24;
  const uint32_t magnitude = byte & 0x7f;
  const uint32_t normal = (magnitude << (23 - Traits::kFractionBits)) + ((127 - Traits::kBias) << 23);
  // The unit of the subnormal numbers.
  const float unit = internal::float_from_bits((128 - Traits::kBias - Traits::kFractionBits) << 23);
  const uint32_t subnormal = internal::bits_from_float(static_cast<float>(magnitude) * unit);
  const uint32_t number = sign | (magnitude < (1u << Traits::kFractionBits) ? subnormal : normal);
  if (internal::kIsFnuz<kFormat>) return byte == Traits::kNan ? 0x7f800001 : number;
  return magnitude == Traits::kNan ? sign | 0x7ff00000 : number;
}

// The nearest byte, ties to even. What lies beyond +-limit, infinity included, becomes +-limit; NaN becomes `nan`.
// `limit_bits`: the bits of the limit, a number that the format has, or the first power of two that it has not.
template <Fp8 kFormat>
WEIGHTLIFT_HOST_DEVICE inline uint8_t float32_to_fp8(uint32_t bits, uint32_t limit_bits, uint8_t nan) {
  using Traits = internal::Fp8Traits<kFormat>;
  constexpr uint32_t kSmallestNormal = (128 - Traits::kBias) << 23;
  constexpr uint32_t kDropped = 23 - Traits::kFractionBits;
  const uint32_t any = bits & 0x7fffffff;
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = any < limit_bits ? any : limit_bits;
  // Rounded by adding a number whose last place is the one that a byte has there: for e4m3 an eighth of the power of
  // two below the magnitude, and for all subnormal numbers that of the smallest normal one.
  const uint32_t power = (magnitude > kSmallestNormal ? magnitude : kSmallestNormal) & internal::kInfinityBits;
  const uint32_t rounder = power + (kDropped << 23);
  const uint32_t places =
      internal::bits_from_float(internal::float_from_bits(magnitude) + internal::float_from_bits(rounder)) - rounder;
  const uint32_t number = places + (power >> kDropped) - (kSmallestNormal >> kDropped);
  const uint32_t signed_number = internal::kIsFnuz<kFormat> && number == 0 ? 0 : sign | number;
  return static_cast<uint8_t>(any > internal::kInfinityBits ? nan : signed_number);
}

// As torch casts: e4m3fn stops at +-448, e5m2 goes on to infinity, the others to their NaN.
template <Fp8 kFormat>
WEIGHTLIFT_HOST_DEVICE inline uint8_t float32_to_fp8(uint32_t bits) {
  using Traits = internal::Fp8Traits<kFormat>;
  return float32_to_fp8<kFormat>(bits, Traits::kCastLimit, static_cast<uint8_t>((bits >> 24 & 0x80) | Traits::kNan));
}

// The same bits as e4m3fnuz are half the value, so that twice the scale makes up for it. Two bytes are no such numbers:
// negative zero, which becomes zero, and NaN, which stays NaN, or, where it is left as it is, becomes +-240.
WEIGHTLIFT_HOST_DEVICE inline uint8_t e4m3fn_to_e4m3fnuz(uint8_t byte, bool keep_nan) {
  if (byte == 0x80) return 0;
  return keep_nan && (byte & 0x7f) == 0x7f ? 0x80 : byte;
}

enum class Rounding : uint8_t {
  kExact,       // the product in float32, and NaN stays NaN
  kThroughFp16  // the scale and the product rounded to float16 first, and NaN becomes the largest number
};

// byte * scale, in units of a new scale, whose inverse is given.
template <Fp8 kFormat>
WEIGHTLIFT_HOST_DEVICE inline uint8_t requantize_fp8(uint8_t byte, float scale, float new_scale_inverse,
                                                     uint32_t limit_bits, Rounding rounding) {
  const auto to_half = [](float value) {
    return internal::float_from_bits(float16_to_float32(float32_to_float16(internal::bits_from_float(value))));
  };
  const float value = internal::float_from_bits(fp8_to_float32<kFormat>(byte));
  const float product = rounding == Rounding::kExact ? value * scale : to_half(value * to_half(scale));
  const uint8_t nan = rounding == Rounding::kExact ? byte : float32_to_fp8<kFormat>(limit_bits, limit_bits, 0);
  return float32_to_fp8<kFormat>(internal::bits_from_float(product * new_scale_inverse), limit_bits, nan);
}

// For a weight of parts, each with a scale of its own, that are brought to the largest of the scales: what becomes of
// the bytes of one part. The scales lie in memory, where a kernel reads them; nobody has looked at them before.
struct RequantizeRule {
  const float* scales;
  int32_t num_scales;
  int32_t part;
  Fp8 format;  // kE4M3FN or kE4M3FNUZ
  Rounding rounding;
  uint32_t limit_bits;
  float unset;  // a slot without a scale holds this, or less. Where the last slot does, there is one scale for all
};

// With Rounding::kExact, a scale that is negative, infinite or NaN makes NaN of its part. Where the largest is not
// above zero, or not finite, everything becomes NaN.
WEIGHTLIFT_HOST_DEVICE inline uint8_t requantized(const RequantizeRule& rule, uint8_t byte) {
  if (rule.scales[rule.num_scales - 1] <= rule.unset) return byte;
  const auto is_finite = [](float value) {
    return (internal::bits_from_float(value) & 0x7fffffff) < internal::kInfinityBits;
  };
  float largest = rule.scales[0];
  bool all_numbers = true;
  for (int32_t i = 0; i < rule.num_scales; ++i) {
    const float scale = rule.scales[i];
    all_numbers = all_numbers && scale == scale;
    largest = scale > largest ? scale : largest;
  }
  const float scale = rule.scales[rule.part];
  const uint8_t nan = rule.format == Fp8::kE4M3FN ? 0x7f : 0x80;
  if (!all_numbers || !(largest > 0) || !is_finite(largest)) return nan;
  if (rule.rounding == Rounding::kExact) {
    if (!(scale >= 0) || !is_finite(scale)) return nan;
    if (scale == largest) return byte;
  }
  const float inverse = 1.0f / largest;
  return rule.format == Fp8::kE4M3FN
             ? requantize_fp8<Fp8::kE4M3FN>(byte, scale, inverse, rule.limit_bits, rule.rounding)
             : requantize_fp8<Fp8::kE4M3FNUZ>(byte, scale, inverse, rule.limit_bits, rule.rounding);
}

// ceil(log2(value)) + 127, kept within what e8m0 has: the byte of the smallest power of two that is not below value.
// `bits`: of a float32 >= 0. Infinity and NaN give 254.
WEIGHTLIFT_HOST_DEVICE inline uint8_t float32_to_e8m0_up(uint32_t bits) {
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7fffff;
  // Below 2^-126, the bits count units of 2^-149, and 2^-127 is the smallest that there is.
  const uint32_t up = exponent == 0 ? (mantissa > 0x400000 ? 1 : 0) : exponent + (mantissa != 0 ? 1 : 0);
  return static_cast<uint8_t>(up < 254 ? up : 254);
}

// As torch casts: the sign is dropped, and the power of two is the nearest, the upper one half way between two normal
// numbers, and the lower one between 2^-127 and 2^-126. Zero gives 2^-127; what is nearer to 2^128 gives NaN, and so
// do infinity and NaN.
WEIGHTLIFT_HOST_DEVICE inline uint8_t float32_to_e8m0(uint32_t bits) {
  const uint32_t exponent = bits >> 23 & 0xff;
  const uint32_t fraction = bits & 0x7fffff;
  const bool up = exponent == 0 ? fraction > 0x400000 : exponent < 255 && fraction >= 0x400000;
  return static_cast<uint8_t>(exponent + (up ? 1 : 0));
}

// 2^(byte - 127), as the bits of a float32. NaN, in torch's bits, for 255.
WEIGHTLIFT_HOST_DEVICE inline uint32_t e8m0_to_float32(uint8_t byte) {
  return byte == 0 ? 0x400000 : byte == 255 ? 0x7f800001 : static_cast<uint32_t>(byte) << 23;
}

}  // namespace weightlift

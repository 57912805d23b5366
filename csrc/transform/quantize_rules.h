// How a scale comes from the largest magnitude, and a number from its scale; one definition for the host and for CUDA.
#pragma once

#include <cstdint>

#include "transform/cast.h"
#include "transform/fp8.h"

namespace weightlift {

enum class QuantizedType : uint8_t { kE4M3FN, kE4M3FNUZ, kInt8 };

struct ScaleRule {
  float max_value = 448;  // what the largest magnitude becomes
  float min_amax = 0;     // magnitudes below count as this one
  float min_scale = 0;
  float max_amax = 0;         // magnitudes above count as this one; 0: no such bound
  bool power_of_two = false;  // the next one up
};

// float32 arithmetic, each step rounded.
WEIGHTLIFT_HOST_DEVICE inline float scale_from_amax(const ScaleRule& rule, float amax) {
  if (rule.max_amax > 0 && amax > rule.max_amax) amax = rule.max_amax;
  if (amax < rule.min_amax) amax = rule.min_amax;
  float scale = amax / rule.max_value;
  if (scale < rule.min_scale) scale = rule.min_scale;
  if (!rule.power_of_two) return scale;
  return internal::float_from_bits(e8m0_to_float32(float32_to_e8m0_up(internal::bits_from_float(scale))));
}

// How a number and its scale meet. They round differently.
enum class Scaling : uint8_t { kMultiply, kDivide };  // by the scale's inverse; by the scale

// What a number is multiplied with, or divided by. A scale of zero, which an all-zero tensor gets, leaves them as they
// are; with `zero_is_infinite` its inverse is infinite, and makes NaN of zero.
WEIGHTLIFT_HOST_DEVICE inline float scaling_factor(Scaling scaling, float scale, bool zero_is_infinite) {
  if (scale == 0 && !zero_is_infinite) return 1.0f;
  return scaling == Scaling::kMultiply ? 1.0f / scale : scale;
}

// `bits`: of a float32, in units of the scale. What lies beyond +-limit becomes +-limit, NaN becomes `nan`.
template <QuantizedType kType>
WEIGHTLIFT_HOST_DEVICE inline uint8_t quantized(uint32_t bits, uint32_t limit_bits, uint8_t nan) {
  if constexpr (kType == QuantizedType::kE4M3FN) {
    return float32_to_fp8<Fp8::kE4M3FN>(bits, limit_bits, nan);
  } else if constexpr (kType == QuantizedType::kE4M3FNUZ) {
    return float32_to_fp8<Fp8::kE4M3FNUZ>(bits, limit_bits, nan);
  } else {
    const uint32_t any = bits & 0x7fffffff;
    const uint32_t magnitude = any < limit_bits ? any : limit_bits;
    const float value = internal::float_from_bits((bits & 0x80000000) | magnitude);
    // Nearest, ties to even: 3 * 2^22 has one as its last place.
    const auto number = static_cast<uint8_t>(internal::bits_from_float(value + 12582912.0f));
    return any > internal::kInfinityBits ? nan : number;
  }
}

// What NaN becomes: NaN, where the type has it, otherwise zero; or the limit.
WEIGHTLIFT_HOST_DEVICE inline uint8_t quantized_nan(QuantizedType type, uint32_t limit_bits, bool keep_nan) {
  switch (type) {
    case QuantizedType::kE4M3FN:
      return keep_nan ? internal::Fp8Traits<Fp8::kE4M3FN>::kNan
                      : quantized<QuantizedType::kE4M3FN>(limit_bits, limit_bits, 0);
    case QuantizedType::kE4M3FNUZ:
      return keep_nan ? internal::Fp8Traits<Fp8::kE4M3FNUZ>::kNan
                      : quantized<QuantizedType::kE4M3FNUZ>(limit_bits, limit_bits, 0);
    default:
      return keep_nan ? 0 : quantized<QuantizedType::kInt8>(limit_bits, limit_bits, 0);
  }
}

}  // namespace weightlift

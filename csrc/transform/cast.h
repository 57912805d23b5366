// The numeric conversions, one definition of each, for the host and for CUDA: bits in, bits out. Here are those of the
// floats of 16 and 32 bits; fp8.h has those of 8 bits, and convert.cpp what C++ itself converts.
//
// They give what torch's CPU copy_ gives, bit for bit (torch 2.13, on a CPU with AVX2). By source and destination:
//
//   bool -> any number            0, or 1 for every byte but 0
//   any number -> bool            whether it is not 0; NaN is true, -0.0 is false. Of a complex number, either part
//   integer -> integer            the low bits, after extension by the sign of a signed source
//   integer -> float64            nearest, ties to even
//   integer -> other floats       first to float32, nearest, then as float32: rounded twice
//   float64 -> shorter floats     first to float32, then as float32: rounded twice
//   bfloat16, float16, float8 -> other floats    first to float32, which is exact, then as float32
//   float32 -> float64            exact
//   float32 -> float16, bfloat16  nearest, ties to even; overflow to infinity; subnormal numbers are kept
//   float32 -> float8_e4m3fn      the same, but it stops at +-448, infinity included
//   float32 -> float8_e5m2        the same, and overflow to infinity
//   float32 -> float8_e4m3fnuz, float8_e5m2fnuz  the same, but overflow and infinity to NaN; -0.0, and what rounds to
//   it,
//                                 to 0
//   float32 -> float8_e8m0fnu     the nearest power of two; the sign is dropped, 0 gives 2^-127, overflow and infinity
//                                 NaN (fp8.h)
//   complex -> complex            each part by itself
//   real -> complex               the real part as above, that of the same type with all its bits but for float16,
//   whose
//                                 NaN is made quiet; the imaginary part is 0
//   float, complex -> integer     not here: out of range it is undefined in C++, and torch's results for a number
//   depend
//                                 on whether it fills a vector. torch itself does these copies
//   complex -> real               not here: torch drops the imaginary part and warns of it, so that it shall do it
//
// Bits of NaN:
//   float32 -> float16, float64, bfloat16 -> float16, float64 -> float32   sign and upper payload bits kept, made quiet
//   bfloat16 -> float32           all bits kept
//   any -> bfloat16               0x7fc0
//   float8_e5m2 -> any            as float16 with the same upper byte
//   float8_e4m3fn -> float32      0x7ff00000 with the sign
//   float8 of the other kinds -> float32   0x7f800001
//   any -> float8_e4m3fn, float8_e5m2      0x7f with the sign
//   any -> float8 of the other kinds       the only NaN that they have
// In two pairs torch's own code paths disagree about the bits of a NaN, and one of them is followed:
//   float32, float64 -> bfloat16  0x7fc0, as for strided operands (torch's contiguous path gives 0xffff)
//   float16 -> float32            sign and payload kept, made quiet, as torch's vectors do (what is left over at the
//   end
//                                 of a contiguous tensor, and fills no vector, becomes 0x7fffffff in torch)
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define WEIGHTLIFT_HOST_DEVICE __host__ __device__
#else
#define WEIGHTLIFT_HOST_DEVICE
#endif

namespace weightlift {

namespace internal {

WEIGHTLIFT_HOST_DEVICE inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

WEIGHTLIFT_HOST_DEVICE inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace internal

// By instructions where it is a number: those of a GPU know one NaN only.
WEIGHTLIFT_HOST_DEVICE inline uint64_t float32_to_float64(uint32_t bits) {
  const uint64_t nan =
      static_cast<uint64_t>(bits >> 31) << 63 | 0x7ff8000000000000 | static_cast<uint64_t>(bits & 0x7fffff) << 29;
  const double value = internal::float_from_bits(bits);
  uint64_t number;
  memcpy(&number, &value, sizeof(number));
  return (bits & 0x7fffffff) > 0x7f800000 ? nan : number;
}

WEIGHTLIFT_HOST_DEVICE inline uint32_t float64_to_float32(uint64_t bits) {
  const auto nan = static_cast<uint32_t>(bits >> 63 << 31 | 0x7fc00000 | (bits >> 29 & 0x7fffff));
  double value;
  memcpy(&value, &bits, sizeof(value));
  const uint32_t number = internal::bits_from_float(static_cast<float>(value));
  return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000 ? nan : number;
}

WEIGHTLIFT_HOST_DEVICE inline uint32_t bfloat16_to_float32(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }

WEIGHTLIFT_HOST_DEVICE inline uint16_t float32_to_bfloat16(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(magnitude > 0x7f800000 ? 0x7fc0 : rounded);
}

WEIGHTLIFT_HOST_DEVICE inline uint32_t float16_to_float32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (112u << 23);  // the exponent's bias grows from 15 to 127
  const uint32_t special = magnitude << 13 | 0x7f800000 | (magnitude > 0x7c00 ? 0x400000 : 0);
  // Exact, and never subnormal as float32: no flush-to-zero mode of the machine can change it.
  const uint32_t subnormal = internal::bits_from_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return sign | (magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : special);
}

WEIGHTLIFT_HOST_DEVICE inline uint16_t float32_to_float16(uint32_t bits) {
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // 0.5 has the unit of float16's subnormals, 2^-24, as its last place: the addition rounds to it.
  const uint32_t subnormal = internal::bits_from_float(internal::float_from_bits(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;  // 2^-14, the smallest normal number
  const uint32_t number = magnitude < 0x477ff000 ? finite : 0x7c00;     // 65520, half way to what would be 2^16
  return static_cast<uint16_t>(sign | (magnitude > 0x7f800000 ? nan : number));
}

WEIGHTLIFT_HOST_DEVICE inline uint16_t float16_to_bfloat16(uint16_t bits) {
  return float32_to_bfloat16(float16_to_float32(bits));
}

WEIGHTLIFT_HOST_DEVICE inline uint16_t bfloat16_to_float16(uint16_t bits) {
  return float32_to_float16(bfloat16_to_float32(bits));
}

}  // namespace weightlift

// Numbers converted in registers: a few at a time, packed in words as they lie in memory.
//
// As convert.cpp does it for rows: they are taken to float32, or int64, by a loop for each type of the source, and from
// there by one for each type of the destination, which makes their sum of loops, not their product. cast.h has the
// rules.
#pragma once

#include <cstdint>

#include "transform/cast.h"
#include "transform/convert.h"
#include "transform/cuda/access.h"
#include "transform/fp8.h"

namespace weightlift {

// Number `i` of those packed in words.
template <typename Number>
WEIGHTLIFT_HOST_DEVICE Number number_at(const uint32_t* words, int i) {
  if constexpr (sizeof(Number) == 8) {
    return static_cast<Number>(words[2 * i] | static_cast<uint64_t>(words[2 * i + 1]) << 32);
  } else {
    constexpr int kOfWord = 4 / sizeof(Number);
    return static_cast<Number>(words[i / kOfWord] >> (8 * static_cast<int>(sizeof(Number)) * (i % kOfWord)));
  }
}

// Packs kCount numbers, of what make(i) returns.
template <typename Number, int kCount, typename Make>
WEIGHTLIFT_HOST_DEVICE void pack_numbers(uint32_t* words, const Make& make) {
  if constexpr (sizeof(Number) == 8) {
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const auto number = static_cast<uint64_t>(make(i));
      words[2 * i] = static_cast<uint32_t>(number);
      words[2 * i + 1] = static_cast<uint32_t>(number >> 32);
    }
  } else {
    constexpr int kOfWord = 4 / sizeof(Number);
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const auto number = static_cast<uint32_t>(static_cast<Number>(make(i)));
      if (i % kOfWord == 0) words[i / kOfWord] = 0;
      words[i / kOfWord] |= number << (8 * static_cast<int>(sizeof(Number)) * (i % kOfWord));
    }
  }
}

namespace internal {

template <typename Src, int kCount, typename Value, typename Decode>
WEIGHTLIFT_HOST_DEVICE void decode(const uint32_t* words, Value* values, const Decode& decode) {
  WEIGHTLIFT_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = decode(number_at<Src>(words, i));
}

template <int kCount, typename Value, typename Convert>
WEIGHTLIFT_HOST_DEVICE void decode_integral(ElementType from, const uint32_t* words, Value* values,
                                            const Convert& convert) {
  switch (from) {
    case ElementType::kBool:
      return decode<uint8_t, kCount>(words, values, [&](uint8_t x) { return convert(x != 0 ? 1 : 0); });
    case ElementType::kUInt8:
      return decode<uint8_t, kCount>(words, values, convert);
    case ElementType::kInt8:
      return decode<int8_t, kCount>(words, values, convert);
    case ElementType::kUInt16:
      return decode<uint16_t, kCount>(words, values, convert);
    case ElementType::kInt16:
      return decode<int16_t, kCount>(words, values, convert);
    case ElementType::kUInt32:
      return decode<uint32_t, kCount>(words, values, convert);
    case ElementType::kInt32:
      return decode<int32_t, kCount>(words, values, convert);
    case ElementType::kUInt64:
      return decode<uint64_t, kCount>(words, values, convert);
    default:
      return decode<int64_t, kCount>(words, values, convert);
  }
}

// To the bits of float32.
template <int kCount>
WEIGHTLIFT_HOST_DEVICE void decode_floats(ElementType from, const uint32_t* words, uint32_t* floats) {
  switch (from) {
    case ElementType::kFloat32:
      return decode<uint32_t, kCount>(words, floats, [](uint32_t x) { return x; });
    case ElementType::kFloat16:
      return decode<uint16_t, kCount>(words, floats, [](uint16_t x) { return float16_to_float32(x); });
    case ElementType::kBFloat16:
      return decode<uint16_t, kCount>(words, floats, [](uint16_t x) { return bfloat16_to_float32(x); });
    case ElementType::kFloat64:
      return decode<uint64_t, kCount>(words, floats, [](uint64_t x) { return float64_to_float32(x); });
    case ElementType::kFloat8E4M3FN:
      return decode<uint8_t, kCount>(words, floats, [](uint8_t x) { return fp8_to_float32<Fp8::kE4M3FN>(x); });
    case ElementType::kFloat8E4M3FNUZ:
      return decode<uint8_t, kCount>(words, floats, [](uint8_t x) { return fp8_to_float32<Fp8::kE4M3FNUZ>(x); });
    case ElementType::kFloat8E5M2:
      return decode<uint8_t, kCount>(words, floats, [](uint8_t x) { return fp8_to_float32<Fp8::kE5M2>(x); });
    case ElementType::kFloat8E5M2FNUZ:
      return decode<uint8_t, kCount>(words, floats, [](uint8_t x) { return fp8_to_float32<Fp8::kE5M2FNUZ>(x); });
    case ElementType::kFloat8E8M0FNU:
      return decode<uint8_t, kCount>(words, floats, [](uint8_t x) { return e8m0_to_float32(x); });
    default:
      return decode_integral<kCount>(from, words, floats,
                                     [](auto x) { return bits_from_float(static_cast<float>(x)); });
  }
}

template <int kCount>
WEIGHTLIFT_HOST_DEVICE void encode_floats(ElementType to, const uint32_t* floats, uint32_t* words) {
  switch (to) {
    case ElementType::kFloat32:
      return pack_numbers<uint32_t, kCount>(words, [&](int i) { return floats[i]; });
    case ElementType::kFloat16:
      return pack_numbers<uint16_t, kCount>(words, [&](int i) { return float32_to_float16(floats[i]); });
    case ElementType::kBFloat16:
      return pack_numbers<uint16_t, kCount>(words, [&](int i) { return float32_to_bfloat16(floats[i]); });
    case ElementType::kFloat64:
      return pack_numbers<uint64_t, kCount>(words, [&](int i) { return float32_to_float64(floats[i]); });
    case ElementType::kFloat8E4M3FN:
      return pack_numbers<uint8_t, kCount>(words, [&](int i) { return float32_to_fp8<Fp8::kE4M3FN>(floats[i]); });
    case ElementType::kFloat8E4M3FNUZ:
      return pack_numbers<uint8_t, kCount>(words, [&](int i) { return float32_to_fp8<Fp8::kE4M3FNUZ>(floats[i]); });
    case ElementType::kFloat8E5M2:
      return pack_numbers<uint8_t, kCount>(words, [&](int i) { return float32_to_fp8<Fp8::kE5M2>(floats[i]); });
    case ElementType::kFloat8E5M2FNUZ:
      return pack_numbers<uint8_t, kCount>(words, [&](int i) { return float32_to_fp8<Fp8::kE5M2FNUZ>(floats[i]); });
    case ElementType::kFloat8E8M0FNU:
      return pack_numbers<uint8_t, kCount>(words, [&](int i) { return float32_to_e8m0(floats[i]); });
    default:  // bool
      return pack_numbers<uint8_t, kCount>(words, [&](int i) { return (floats[i] & 0x7fffffff) != 0 ? 1 : 0; });
  }
}

template <int kCount>
WEIGHTLIFT_HOST_DEVICE void encode_integers(ElementType to, int bytes, const int64_t* integers, uint32_t* words) {
  if (to == ElementType::kBool) {
    pack_numbers<uint8_t, kCount>(words, [&](int i) { return integers[i] != 0 ? 1 : 0; });
  } else if (bytes == 1) {
    pack_numbers<uint8_t, kCount>(words, [&](int i) { return integers[i]; });
  } else if (bytes == 2) {
    pack_numbers<uint16_t, kCount>(words, [&](int i) { return integers[i]; });
  } else if (bytes == 4) {
    pack_numbers<uint32_t, kCount>(words, [&](int i) { return integers[i]; });
  } else {
    pack_numbers<uint64_t, kCount>(words, [&](int i) { return integers[i]; });
  }
}

}  // namespace internal

// How elements of one type become those of another, as far as a kernel must know it.
struct ElementConversion {
  bool needed = false;  // false: elements are moved
  Through through = Through::kNothing;
  ElementType src_part{};
  ElementType dst_part{};
  int8_t src_part_bytes = 1;
  int8_t dst_part_bytes = 1;
  int8_t src_bytes = 1;
  int8_t dst_bytes = 1;
};

// kCount numbers, none complex. `words` and `out` have room for kCount numbers of 8 bytes.
template <int kCount>
WEIGHTLIFT_HOST_DEVICE void convert_numbers(const ElementConversion& conversion, const uint32_t* words, uint32_t* out) {
  using namespace internal;
  switch (conversion.through) {
    case Through::kNothing:
      WEIGHTLIFT_UNROLL
      for (int i = 0; i < 2 * kCount; ++i) out[i] = words[i];
      return;
    case Through::kFloat32: {
      uint32_t floats[kCount];
      decode_floats<kCount>(conversion.src_part, words, floats);
      return encode_floats<kCount>(conversion.dst_part, floats, out);
    }
    case Through::kInt64: {
      int64_t integers[kCount];
      decode_integral<kCount>(conversion.src_part, words, integers, [](auto x) { return static_cast<int64_t>(x); });
      return encode_integers<kCount>(conversion.dst_part, conversion.dst_part_bytes, integers, out);
    }
    case Through::kFloat64: {
      double doubles[kCount];
      decode_integral<kCount>(conversion.src_part, words, doubles, [](auto x) { return static_cast<double>(x); });
      return pack_numbers<uint64_t, kCount>(out, [&](int i) {
        uint64_t bits;
        memcpy(&bits, doubles + i, sizeof(bits));
        return bits;
      });
    }
    case Through::kBool:
      return pack_numbers<uint8_t, kCount>(out, [&](int i) { return number_at<uint64_t>(words, i) << 1 != 0 ? 1 : 0; });
  }
}

// One element of any type, up to 16 bytes.
WEIGHTLIFT_HOST_DEVICE inline void convert_element(const ElementConversion& conversion, const uint32_t* words,
                                                   uint32_t* out) {
  const bool src_complex = conversion.src_bytes != conversion.src_part_bytes;
  const bool dst_complex = conversion.dst_bytes != conversion.dst_part_bytes;
  const auto part = [&](bool imaginary, const uint32_t* of, uint32_t* to) {
    // Parts of 2 bytes share a word.
    const int bytes = conversion.src_part_bytes;
    const uint32_t first = bytes == 8 ? of[2 * imaginary] : bytes == 4 ? of[imaginary] : of[0] >> (16 * imaginary);
    const uint32_t number[2] = {src_complex ? first : of[0],
                                src_complex && bytes < 8 ? 0 : of[src_complex ? 2 * imaginary + 1 : 1]};
    convert_numbers<1>(conversion, number, to);
  };
  uint32_t real[2] = {0, 0};
  uint32_t imaginary[2] = {0, 0};
  part(false, words, real);
  if (src_complex) part(true, words, imaginary);
  if (!dst_complex) {
    out[0] = real[0] | imaginary[0];  // to bool: true where either is
    out[1] = real[1];
  } else if (conversion.dst_part_bytes == 8) {
    out[0] = real[0];
    out[1] = real[1];
    out[2] = imaginary[0];
    out[3] = imaginary[1];
  } else if (conversion.dst_part_bytes == 4) {
    out[0] = real[0];
    out[1] = imaginary[0];
  } else {
    out[0] = (real[0] & 0xffff) | imaginary[0] << 16;
  }
}

}  // namespace weightlift

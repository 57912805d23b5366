// What an element of a tensor is to the transforms: its size and, where numbers are converted, its format.
#pragma once

#include <cstdint>

namespace weightlift {

// Elements that are only moved are known by their size; those that are converted, by their format. Python knows them by
// their position here.
enum class ElementType : uint8_t {
  kBytes1,
  kBytes2,
  kBytes4,
  kBytes8,
  kBytes16,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat64,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat8E5M2,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kBool,  // a byte; anything but 0 is true
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kComplex32,  // two of float16, the real part first; and so on
  kComplex64,
  kComplex128
};
inline constexpr int kNumElementTypes = 26;

constexpr int64_t element_bytes(ElementType type) {
  using enum ElementType;
  switch (type) {
    case kBytes1:
    case kFloat8E4M3FN:
    case kFloat8E4M3FNUZ:
    case kFloat8E5M2:
    case kFloat8E5M2FNUZ:
    case kFloat8E8M0FNU:
    case kBool:
    case kUInt8:
    case kInt8:
      return 1;
    case kBytes2:
    case kFloat16:
    case kBFloat16:
    case kUInt16:
    case kInt16:
      return 2;
    case kBytes4:
    case kFloat32:
    case kUInt32:
    case kInt32:
    case kComplex32:
      return 4;
    case kBytes8:
    case kFloat64:
    case kUInt64:
    case kInt64:
    case kComplex64:
      return 8;
    case kBytes16:
    case kComplex128:
      return 16;
  }
  return 0;
}

}  // namespace weightlift

// What an element of a tensor is to the transforms: its size and, where numbers are converted, its format.
#pragma once

#include <cstdint>

namespace weightlift {

// Types that are only moved are known by their size; the three that can be converted into one another have names.
enum class ElementType : uint8_t { kBytes1, kBytes2, kBytes4, kBytes8, kBytes16, kFloat32, kFloat16, kBFloat16 };

constexpr int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kBytes1:
      return 1;
    case ElementType::kBytes2:
    case ElementType::kFloat16:
    case ElementType::kBFloat16:
      return 2;
    case ElementType::kBytes4:
    case ElementType::kFloat32:
      return 4;
    case ElementType::kBytes8:
      return 8;
    case ElementType::kBytes16:
      return 16;
  }
  return 0;
}

}  // namespace weightlift

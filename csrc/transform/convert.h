// Conversion: neighbouring elements of one format into those of another, by the rules of cast.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transform/element.h"

namespace weightlift {

// Whether elements can be converted as torch's copy_ does. Equal types can: they are moved. Not so floats and complex
// numbers to integers, whose result is undefined out of range and differs between torch's own code paths; nor complex
// numbers to real ones, of which torch warns. Nor what is known by its size alone.
bool can_convert(ElementType src, ElementType dst);

// By way of which values numbers of one type become those of another; of complex numbers, each part.
enum class Through : uint8_t {
  kNothing,  // their bits are moved
  kFloat32,
  kInt64,    // from integers and bools to each other
  kFloat64,  // from integers and bools to float64, at once
  kBool      // from float64
};
Through through(ElementType src, ElementType dst);  // REQUIRES: can_convert(src, dst)

// What a complex number is made of; other numbers of themselves.
ElementType part_of(ElementType type);

class Conversion {
 public:
  // REQUIRES: can_convert(src, dst), src != dst.
  Conversion(ElementType src, ElementType dst);

  // `count` elements, contiguous on both sides. No side needs any alignment; they must not overlap.
  void convert(const std::byte* src, std::byte* dst, int64_t count) const;

 private:
  using RowFunction = void (*)(const std::byte* src, std::byte* dst, int64_t count);

  void convert_numbers(const std::byte* src, std::byte* dst, int64_t count) const;

  ElementType src_;
  ElementType dst_;
  // Of the parts of complex numbers, or of the numbers themselves. Either may be missing: with both, values are in
  // between int64, or float32.
  RowFunction decode_ = nullptr;
  RowFunction encode_ = nullptr;
  int64_t src_part_bytes_;
  int64_t dst_part_bytes_;
};

}  // namespace weightlift

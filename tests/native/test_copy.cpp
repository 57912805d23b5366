#include "transform/copy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "plan/geometry.h"
#include "transform/cast.h"
#include "transform/convert.h"

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

namespace weightlift {
namespace {

using Random = std::mt19937_64;
using Memory = std::vector<std::byte>;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Memory random_memory(Random& random, int64_t bytes) {
  Memory memory(static_cast<size_t>(bytes));
  std::ranges::generate(memory, [&] { return static_cast<std::byte>(random()); });
  return memory;
}

// The oracle of the conversions: IEEE 754 by its definition, through double, which holds every value exactly.
struct Format {
  ElementType type;
  int fraction_bits;
  int exponent_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << fraction_bits; }
  uint32_t sign() const { return 1u << (fraction_bits + exponent_bits); }
};
constexpr Format kFormats[] = {
    {ElementType::kFloat32, 23, 8}, {ElementType::kFloat16, 10, 5}, {ElementType::kBFloat16, 7, 8}};

double decode(uint32_t bits, const Format& format) {
  const int exponent = static_cast<int>((bits & format.infinity()) >> format.fraction_bits);
  const double fraction = std::ldexp(bits & ((1u << format.fraction_bits) - 1), -format.fraction_bits);
  const double magnitude = (bits & format.infinity()) == format.infinity() ? (fraction == 0 ? INFINITY : NAN)
                           : exponent == 0 ? std::ldexp(fraction, 1 - format.bias())
                                           : std::ldexp(1 + fraction, exponent - format.bias());
  return (bits & format.sign()) != 0 ? -magnitude : magnitude;
}

uint32_t encode(double value, const Format& format) {  // not for NaN
  const uint32_t sign = std::signbit(value) ? format.sign() : 0;
  if (value == 0) return sign;
  if (std::isinf(value)) return sign | format.infinity();
  const int exponent = std::max(std::ilogb(value), 1 - format.bias());
  // In units of the last place: rounding may carry into the next exponent, which the addition below carries on.
  const auto units =
      static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), format.fraction_bits - exponent)));
  const uint32_t bits = (static_cast<uint32_t>(exponent + format.bias() - 1) << format.fraction_bits) + units;
  return sign | std::min(bits, format.infinity());
}

uint32_t expected_nan(uint32_t bits, const Format& src, const Format& dst) {
  if (dst.type == ElementType::kBFloat16) return 0x7fc0;
  const uint32_t sign = (bits & src.sign()) != 0 ? dst.sign() : 0;
  const uint32_t payload = bits & ((1u << src.fraction_bits) - 1);
  const int wider = dst.fraction_bits - src.fraction_bits;
  const uint32_t kept = wider >= 0 ? payload << wider : payload >> -wider;
  const bool quiet = src.type != ElementType::kBFloat16 || dst.type != ElementType::kFloat32;
  return sign | dst.infinity() | kept | (quiet ? 1u << (dst.fraction_bits - 1) : 0);
}

uint32_t expected_bits(uint32_t bits, const Format& src, const Format& dst) {
  const double value = decode(bits, src);
  return std::isnan(value) ? expected_nan(bits, src, dst) : encode(value, dst);
}

// Every 16-bit pattern; of float32 all exponents with the fractions around which rounding to a shorter fraction turns.
std::vector<uint32_t> interesting_bits(const Format& format) {
  std::vector<uint32_t> patterns;
  if (format.type != ElementType::kFloat32) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) patterns.push_back(bits);
    return patterns;
  }
  for (uint32_t exponent = 0; exponent < 512; ++exponent) {  // and both signs
    for (int bit = 0; bit <= 23; ++bit) {
      for (uint32_t upper : {0u, 1u, 2u, 3u, 0x7fffffu}) {
        for (uint32_t off : {0u, 1u, ~0u}) {
          const uint32_t fraction = ((upper << bit) | (1u << bit >> 1)) + off;
          patterns.push_back(exponent << 23 | (fraction & 0x7fffff));
        }
      }
    }
  }
  Random random(1);
  for (int i = 0; i < 500000; ++i) patterns.push_back(static_cast<uint32_t>(random()));
  return patterns;
}

// Converts through copy_elements, `dst_step` elements apart.
std::vector<uint32_t> converted(const std::vector<uint32_t>& patterns, const Format& src, const Format& dst,
                                int64_t dst_step) {
  const int64_t src_item = element_bytes(src.type);
  const int64_t dst_item = element_bytes(dst.type);
  const auto count = static_cast<int64_t>(patterns.size());
  Memory from(static_cast<size_t>(count * src_item));
  Memory to(static_cast<size_t>(count * dst_item * dst_step));
  for (int64_t i = 0; i < count; ++i) std::memcpy(&from[i * src_item], &patterns[i], src_item);  // little endian
  Transfer transfer;
  transfer.src_type = src.type;
  transfer.dst_type = dst.type;
  transfer.dst = to.data();
  transfer.dims = {{count, src_item, dst_item * dst_step}};
  copy_elements(transfer, 0, count, from.data(), 0);
  std::vector<uint32_t> result(patterns.size());
  for (int64_t i = 0; i < count; ++i) std::memcpy(&result[i], &to[i * dst_item * dst_step], dst_item);
  return result;
}

TEST_CASE("conversions are those of IEEE 754, in rows and one by one") {
  for (const Format& src : kFormats) {
    const std::vector<uint32_t> patterns = interesting_bits(src);
    for (const Format& dst : kFormats) {
      if (src.type == dst.type) continue;
      const std::vector<uint32_t> row = converted(patterns, src, dst, 1);
      const std::vector<uint32_t> single = converted(patterns, src, dst, 2);
      int wrong = 0;
      for (size_t i = 0; i < patterns.size(); ++i) {
        const uint32_t expected = expected_bits(patterns[i], src, dst);
        if (row[i] == expected && single[i] == expected) continue;
        if (++wrong == 1)
          MESSAGE("bits ", patterns[i], ": expected ", expected, ", found ", row[i], " and ", single[i]);
      }
      CAPTURE(static_cast<int>(src.type));
      CAPTURE(static_cast<int>(dst.type));
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("rounding at the ends of the range") {
  const auto to_float16 = [](float value) { return float32_to_float16(std::bit_cast<uint32_t>(value)); };
  CHECK(to_float16(65504.0f) == 0x7bff);  // the largest number
  CHECK(to_float16(std::nextafter(65520.0f, 0.0f)) == 0x7bff);
  CHECK(to_float16(65520.0f) == 0x7c00);  // half way: to even, which is infinity
  CHECK(to_float16(0x1p-25f) == 0x0000);  // half of the smallest number: to even, which is zero
  CHECK(to_float16(std::nextafter(0x1p-25f, 1.0f)) == 0x0001);
  CHECK(to_float16(std::nextafter(0x1p-14f, 0.0f)) == 0x0400);  // subnormal, rounded up to the smallest normal number
  CHECK(to_float16(-0.0f) == 0x8000);
  CHECK(float32_to_bfloat16(0x7f7fffff) == 0x7f80);
  CHECK(float32_to_bfloat16(0x00008000) == 0x0000);
  CHECK(float32_to_bfloat16(0x00018000) == 0x0002);
}

constexpr int kFirstFormat = static_cast<int>(ElementType::kFloat32);  // those before are known by size alone

TEST_CASE("what torch leaves undefined or warns of can not be converted") {
  using enum ElementType;
  const auto type_of = [](int code) { return static_cast<ElementType>(code); };
  for (int code = 0; code < kNumElementTypes; ++code) {
    CHECK(element_bytes(type_of(code)) > 0);
    CHECK(can_convert(type_of(code), type_of(code)));
    CHECK(can_convert(kBytes1, type_of(code)) == (code == 0));
    CHECK(can_convert(type_of(code), kBytes4) == (type_of(code) == kBytes4));
    const bool is_number = code >= kFirstFormat;
    CHECK(can_convert(type_of(code), kBool) == is_number);
    CHECK(can_convert(type_of(code), kComplex64) == is_number);
    CHECK(can_convert(type_of(code), kFloat8E5M2) == (is_number && type_of(code) < kComplex32));
    CHECK(can_convert(type_of(code), kInt16) == (kBool <= type_of(code) && type_of(code) <= kInt64));
  }
}

// A copy between views of two buffers, with dimensions in any order.
struct Case {
  ElementType src_type;
  ElementType dst_type;
  std::vector<Dim> dims;
  int64_t src_bytes;  // from the first element's begin to the last one's end
  int64_t dst_bytes;
};

// Nested on both sides, each in an order of dimensions of its own, with and without gaps that break alignment.
Case random_case(Random& random) {
  Case made;
  made.src_type = static_cast<ElementType>(uniform(random, 0, kNumElementTypes - 1));
  made.dst_type = static_cast<ElementType>(uniform(random, kFirstFormat, kNumElementTypes - 1));
  if (!can_convert(made.src_type, made.dst_type)) made.dst_type = made.src_type;
  const int64_t rank = uniform(random, 0, 5);
  const int64_t longest[] = {1, 300, 80, 16, 7, 4};
  for (int64_t d = 0; d < rank; ++d) made.dims.push_back({uniform(random, 1, longest[rank]), 0, 0});

  const auto lay_out = [&](int64_t item_bytes, int64_t Dim::* stride, bool may_repeat) {
    const bool gaps = uniform(random, 0, 1) != 0;
    int64_t extent = item_bytes;
    for (Dim& dim : made.dims) {
      if (may_repeat && uniform(random, 0, 7) == 0) continue;  // stride 0
      dim.*stride = extent + (gaps ? uniform(random, 0, 2) * uniform(random, 0, 9) : 0);
      extent += (dim.size - 1) * (dim.*stride);
    }
    return extent;
  };
  made.src_bytes = lay_out(element_bytes(made.src_type), &Dim::src_stride, true);
  if (uniform(random, 0, 1) != 0) std::ranges::shuffle(made.dims, random);
  made.dst_bytes = lay_out(element_bytes(made.dst_type), &Dim::dst_stride, false);
  std::ranges::shuffle(made.dims, random);
  return made;
}

void convert_element(const std::byte* src, std::byte* dst, ElementType src_type, ElementType dst_type) {
  if (src_type == dst_type) {
    std::memcpy(dst, src, static_cast<size_t>(element_bytes(src_type)));
    return;
  }
  const auto is = [](ElementType type) { return [type](const Format& format) { return format.type == type; }; };
  if (std::ranges::none_of(kFormats, is(src_type)) || std::ranges::none_of(kFormats, is(dst_type))) {
    return Conversion(src_type, dst_type).convert(src, dst, 1);  // tests/test_casts.py knows what is right
  }
  uint32_t bits = 0;
  std::memcpy(&bits, src, static_cast<size_t>(element_bytes(src_type)));
  bits =
      expected_bits(bits, *std::ranges::find_if(kFormats, is(src_type)), *std::ranges::find_if(kFormats, is(dst_type)));
  std::memcpy(dst, &bits, static_cast<size_t>(element_bytes(dst_type)));
}

void copy_naively(const Case& made, size_t dim, const std::byte* src, std::byte* dst) {
  if (dim == made.dims.size()) return convert_element(src, dst, made.src_type, made.dst_type);
  const Dim& d = made.dims[dim];
  for (int64_t i = 0; i < d.size; ++i) copy_naively(made, dim + 1, src + i * d.src_stride, dst + i * d.dst_stride);
}

TEST_CASE("random copies, whole and in parts, write the right bytes and no others") {
  Random random(2);
  for (int i = 0; i < 4000; ++i) {
    const Case made = random_case(random);
    const int64_t src_shift = uniform(random, 0, 17);
    const int64_t dst_shift = uniform(random, 0, 17);
    const Memory file = random_memory(random, src_shift + made.src_bytes);
    const Memory before = random_memory(random, dst_shift + made.dst_bytes + uniform(random, 0, 9));
    Memory expected = before;
    copy_naively(made, 0, file.data() + src_shift, expected.data() + dst_shift);

    Memory found = before;
    Transfer transfer;
    transfer.src_type = made.src_type;
    transfer.dst_type = made.dst_type;
    transfer.src_offset = src_shift;
    transfer.dst = found.data() + dst_shift;
    transfer.dims = made.dims;
    canonicalise(transfer.dims);
    REQUIRE(source_is_nested(transfer));
    const int64_t elements = transfer.num_elements();
    copy_elements(transfer, 0, elements, file.data(), 0);
    REQUIRE(found == expected);

    // In parts, in any order, each with no more of the file at hand than it needs.
    std::vector<int64_t> cuts{0, elements};
    for (int64_t n = uniform(random, 0, 5); n > 0; --n) cuts.push_back(uniform(random, 0, elements));
    std::ranges::sort(cuts);
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (size_t c = 1; c < cuts.size(); ++c) parts.emplace_back(cuts[c - 1], cuts[c]);
    std::ranges::shuffle(parts, random);
    std::ranges::copy(before, found.begin());
    for (auto [first, last] : parts) {
      if (first == last) {
        copy_elements(transfer, first, last, nullptr, 0);
        continue;
      }
      const int64_t begin = src_shift + source_byte(transfer, first);
      const int64_t end = src_shift + source_byte(transfer, last - 1) + element_bytes(made.src_type);
      const Memory piece(file.begin() + begin, file.begin() + end);
      copy_elements(transfer, first, last, piece.data(), begin);
    }
    REQUIRE(found == expected);
  }
}

TEST_CASE("a transposed matrix larger than a tile") {
  const int64_t rows = 117;
  const int64_t columns = 75;
  Random random(3);
  const Memory matrix = random_memory(random, rows * columns * 2);
  Memory transposed(matrix.size());
  Transfer transfer;
  transfer.src_type = transfer.dst_type = ElementType::kBytes2;
  transfer.dst = transposed.data();
  transfer.dims = {{rows, columns * 2, 2}, {columns, 2, rows * 2}};
  copy_elements(transfer, 0, rows * columns, matrix.data(), 0);
  int wrong = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      wrong += std::memcmp(&transposed[(c * rows + r) * 2], &matrix[(r * columns + c) * 2], 2) != 0;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace weightlift

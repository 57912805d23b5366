#include "transform/op.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "transform/map_bytes.h"
#include "transform/marlin_repack.h"
#include "transform/quantize.h"
#include "transform/simd.h"

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

namespace weightlift {
namespace {

using Random = std::mt19937_64;
using Memory = std::vector<std::byte>;

constexpr Simd kAll[] = {Simd::kBaseline, Simd::kAvx2, Simd::kAvx512};

class SimdLimit {
 public:
  explicit SimdLimit(Simd limit) { limit_simd(limit); }
  ~SimdLimit() { limit_simd(Simd::kAvx512); }
};

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Memory random_memory(Random& random, int64_t bytes) {
  Memory memory(static_cast<size_t>(bytes));
  std::ranges::generate(memory, [&] { return static_cast<std::byte>(random()); });
  return memory;
}

// A source somewhere in memory: at an odd place, with gaps between its rows.
struct Source {
  Source(Random& random, int64_t rows, int64_t row_bytes)
      : offset(uniform(random, 0, 70)),
        stride(row_bytes + uniform(random, 0, 1) * uniform(random, 0, 70)),
        memory(random_memory(random, offset + rows * stride)) {}

  const std::byte* data() const { return memory.data() + offset; }
  uint32_t word(int64_t row, int64_t column) const {
    uint32_t word;
    std::memcpy(&word, data() + row * stride + 4 * column, sizeof(word));
    return word;
  }

  int64_t offset;
  int64_t stride;
  Memory memory;
};

// An output somewhere in memory, whose surroundings must stay as they are.
class Target {
 public:
  Target(Random& random, int64_t rows, int64_t row_bytes)
      : rows_(rows),
        row_bytes_(row_bytes),
        offset_(uniform(random, 0, 70)),
        stride_(row_bytes + uniform(random, 0, 1) * uniform(random, 0, 70)),
        before_(random_memory(random, offset_ + rows * stride_ + 70)),
        memory_(before_) {}

  OpOutput output() { return {memory_.data() + offset_, rows_, row_bytes_, stride_}; }
  void reset() { memory_ = before_; }
  // The rows, one behind the other. Checks that nothing else was written.
  Memory rows() {
    Memory rows;
    Memory outside = memory_;
    for (int64_t r = 0; r < rows_; ++r) {
      const auto first = memory_.begin() + offset_ + r * stride_;
      rows.insert(rows.end(), first, first + row_bytes_);
      std::copy_n(before_.begin() + offset_ + r * stride_, row_bytes_, outside.begin() + offset_ + r * stride_);
    }
    CHECK(outside == before_);
    return rows;
  }

 private:
  int64_t rows_;
  int64_t row_bytes_;
  int64_t offset_;
  int64_t stride_;
  Memory before_;
  Memory memory_;
};

// Runs an op part by part, the parts in any order, each from a copy that ends where the part does.
void run_in_parts(Random& random, const Op& op, const Source& source) {
  const auto [num_rows, row_bytes, granule_rows] = op.source();
  std::vector<int64_t> starts{0};
  while (starts.back() < num_rows) {
    starts.push_back(std::min(num_rows, starts.back() + granule_rows * uniform(random, 1, 3)));
  }
  std::vector<size_t> order(starts.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, random);
  for (const size_t part : order) {
    const int64_t rows = starts[part + 1] - starts[part];
    const std::byte* from = source.data() + starts[part] * source.stride;
    const Memory copy(from, from + (rows - 1) * source.stride + row_bytes);
    op.run(copy.data(), source.stride, starts[part], rows);
  }
}

// ---- 8-bit floats

double fp8_value(uint8_t byte, int bias) {  // not for NaN
  const int exponent = byte >> 3 & 15;
  const double fraction = byte & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -2 - bias) : std::ldexp(8 + fraction, exponent - 3 - bias);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

bool is_nan(Fp8 format, uint8_t byte) { return format == Fp8::kE4M3FN ? (byte & 0x7f) == 0x7f : byte == 0x80; }

// The nearest of all bytes, the even one of two.
uint8_t nearest(Fp8 format, double value, double limit) {
  const int bias = format == Fp8::kE4M3FN ? 7 : 8;
  value = std::clamp(value, -limit, limit);
  int best = -1;
  double best_distance = INFINITY;
  for (int byte = 0; byte < 256; ++byte) {
    if (is_nan(format, static_cast<uint8_t>(byte)) || std::signbit(value) != (byte >= 0x80)) continue;
    const double distance = std::abs(fp8_value(static_cast<uint8_t>(byte), bias) - value);
    if (distance < best_distance || (distance == best_distance && byte % 2 == 0)) {
      best = byte;
      best_distance = distance;
    }
  }
  if (best < 0) return 0;                                                           // e4m3fnuz has no negative zero ...
  if (format == Fp8::kE4M3FNUZ && std::abs(value) <= std::ldexp(1, -11)) return 0;  // ... to round to
  return static_cast<uint8_t>(best);
}

template <Fp8 kFormat>
void check_fp8(float limit) {
  const int bias = kFormat == Fp8::kE4M3FN ? 7 : 8;
  const uint32_t limit_bits = std::bit_cast<uint32_t>(limit);
  for (int byte = 0; byte < 256; ++byte) {
    const auto code = static_cast<uint8_t>(byte);
    const auto value = std::bit_cast<float>(fp8_to_float32<kFormat>(code));
    if (is_nan(kFormat, code)) {
      CHECK(std::isnan(value));
      CHECK(float32_to_fp8<kFormat>(std::bit_cast<uint32_t>(value), limit_bits, code) == code);
    } else {
      CHECK(value == fp8_value(code, bias));
    }
  }
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (i % 2 == 0) {  // on and beside the ties
      const double a = fp8_value(static_cast<uint8_t>(uniform(random, 0, 0x7d)), bias);
      const double b = fp8_value(static_cast<uint8_t>(uniform(random, 0, 0x7d)), bias);
      value = static_cast<float>((a + b) / 2);
      value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) + static_cast<uint32_t>(uniform(random, -1, 1)));
    }
    if (std::isnan(value)) continue;
    CHECK(float32_to_fp8<kFormat>(std::bit_cast<uint32_t>(value), limit_bits, 0x55) == nearest(kFormat, value, limit));
  }
}

TEST_CASE("8-bit floats are rounded to the nearest, ties to even, and kept below the limit") {
  check_fp8<Fp8::kE4M3FN>(448);
  check_fp8<Fp8::kE4M3FNUZ>(240);
  check_fp8<Fp8::kE4M3FNUZ>(224);
}

TEST_CASE("e4m3fn and e4m3fnuz bytes stand for the same numbers but for the scale, NaN, and negative zero") {
  for (int byte = 0; byte < 256; ++byte) {
    const auto code = static_cast<uint8_t>(byte);
    const uint8_t converted = e4m3fn_to_e4m3fnuz(code, true);
    if (is_nan(Fp8::kE4M3FN, code)) {
      CHECK(is_nan(Fp8::kE4M3FNUZ, converted));
      CHECK(e4m3fn_to_e4m3fnuz(code, false) == code);
    } else {
      CHECK(2 * fp8_value(converted, 8) == fp8_value(code, 7));
    }
  }
}

TEST_CASE("e8m0 scales are the next power of two up") {
  for (const auto& [value, byte] : std::vector<std::pair<float, int>>{{1.0f, 127},
                                                                      {std::nextafter(1.0f, 2.0f), 128},
                                                                      {0.0f, 0},
                                                                      {0x1p-127f, 0},
                                                                      {0x1.1p-127f, 1},
                                                                      {0x1p-126f, 1},
                                                                      {0x1p127f, 254},
                                                                      {INFINITY, 254},
                                                                      {448.0f / 448.0f, 127},
                                                                      {449.0f / 448.0f, 128}}) {
    CHECK(float32_to_e8m0_up(std::bit_cast<uint32_t>(value)) == byte);
  }
  for (int byte = 0; byte < 255; ++byte) {
    const auto value = std::bit_cast<float>(e8m0_to_float32(static_cast<uint8_t>(byte)));
    CHECK(value == std::ldexp(1.0, byte - 127));
    CHECK(float32_to_e8m0_up(std::bit_cast<uint32_t>(value)) == byte);
  }
}

// ---- Marlin

struct RepackCase {
  PackedLayout layout;
  int num_bits;
  bool is_a_8bit;
};

std::vector<RepackCase> repack_cases() {
  std::vector<RepackCase> cases;
  for (const PackedLayout layout : {PackedLayout::kGptq, PackedLayout::kAwq, PackedLayout::kNMajor}) {
    for (const int num_bits : {4, 8}) {
      for (const bool is_a_8bit : {false, true}) cases.push_back({layout, num_bits, is_a_8bit});
    }
  }
  return cases;
}

uint32_t source_value(const RepackCase& repack, const Source& source, int64_t k, int64_t n) {
  const auto word = [&](int64_t row, int64_t column) { return source.word(row, column); };
  switch (repack.layout) {
    case PackedLayout::kGptq:
      return repack.num_bits == 4 ? packed_value<4, PackedLayout::kGptq>(word, k, n)
                                  : packed_value<8, PackedLayout::kGptq>(word, k, n);
    case PackedLayout::kAwq:
      return repack.num_bits == 4 ? packed_value<4, PackedLayout::kAwq>(word, k, n)
                                  : packed_value<8, PackedLayout::kAwq>(word, k, n);
    default:
      return repack.num_bits == 4 ? packed_value<4, PackedLayout::kNMajor>(word, k, n)
                                  : packed_value<8, PackedLayout::kNMajor>(word, k, n);
  }
}

// By the definition, word for word.
template <int kBits, bool kA8>
Memory repacked_by_definition(const MarlinRepack& repack, const std::function<uint32_t(int64_t, int64_t)>& value) {
  using Tile = MarlinTile<kBits, kA8>;
  Memory out;
  for (int64_t k = 0; k < repack.padded_k; k += Tile::kRows) {
    for (int64_t n = 0; n < repack.padded_n; n += Tile::kColumns) {
      for (int word = 0; word < Tile::kWords; ++word) {
        const uint32_t packed = Tile::pack(word, [&](int tile_k, int tile_n) {
          const bool present = k + tile_k < repack.size_k && n + tile_n < repack.size_n;
          return present ? value(k + tile_k, n + tile_n) : 0;
        });
        const auto bytes = std::as_bytes(std::span(&packed, 1));
        out.insert(out.end(), bytes.begin(), bytes.end());
      }
    }
  }
  return out;
}

Memory repacked_by_definition(const MarlinRepack& repack, const std::function<uint32_t(int64_t, int64_t)>& value) {
  if (repack.num_bits == 4) {
    return repack.is_a_8bit ? repacked_by_definition<4, true>(repack, value)
                            : repacked_by_definition<4, false>(repack, value);
  }
  return repack.is_a_8bit ? repacked_by_definition<8, true>(repack, value)
                          : repacked_by_definition<8, false>(repack, value);
}

void check_repack(Random& random, const RepackCase& repack_case, MarlinRepack repack) {
  const int64_t values = 32 / repack.num_bits;
  const int64_t rows = repack.layout == PackedLayout::kGptq  ? repack.size_k / values
                       : repack.layout == PackedLayout::kAwq ? repack.size_k
                                                             : repack.size_n;
  const int64_t words = repack.layout == PackedLayout::kGptq  ? repack.size_n
                        : repack.layout == PackedLayout::kAwq ? repack.size_n / values
                                                              : repack.size_k / values;
  const Source source(random, rows, 4 * words);
  const int64_t tile_k = repack.is_a_8bit ? 32 : 16;
  Target target(random, repack.padded_k / tile_k, repack.padded_n * tile_k / values * 4);
  const Memory expected = repacked_by_definition(repack, [&](int64_t k, int64_t n) {
    return source_value(repack_case, source, repack.perm.empty() ? k : repack.perm[static_cast<size_t>(k)], n);
  });
  for (const Simd simd : kAll) {
    CAPTURE(static_cast<int>(simd));
    const SimdLimit limit(simd);
    target.reset();
    const auto op = make_marlin_repack(repack, target.output());
    REQUIRE(op->source().num_rows == rows);
    REQUIRE(op->source().row_bytes == 4 * words);
    run_in_parts(random, *op, source);
    CHECK(target.rows() == expected);
    target.reset();
    run_op(*op, source.data(), source.stride, 3);
    CHECK(target.rows() == expected);
  }
}

TEST_CASE("Marlin repacking is what the layout says: any sizes, strides, places, order of parts; padding; perm") {
  Random random(2);
  for (int i = 0; i < 20; ++i) {
    for (const RepackCase& repack_case : repack_cases()) {
      CAPTURE(i);
      CAPTURE(static_cast<int>(repack_case.layout));
      CAPTURE(repack_case.num_bits);
      CAPTURE(repack_case.is_a_8bit);
      const int64_t tile_k = repack_case.is_a_8bit ? 32 : 16;
      const int64_t tile_n = repack_case.is_a_8bit ? 32 : 64;
      MarlinRepack repack{repack_case.layout, repack_case.num_bits, repack_case.is_a_8bit, 0, 0, 0, 0, {}};
      repack.padded_k = tile_k * uniform(random, 1, 9);
      repack.padded_n = tile_n * uniform(random, 1, 5);
      repack.size_k = repack.padded_k;
      repack.size_n = repack.padded_n;
      if (i % 3 == 1) {
        repack.size_k = 8 * uniform(random, 1, repack.padded_k / 8);
        repack.size_n = 8 * uniform(random, 1, repack.padded_n / 8);
      } else if (i % 3 == 2 && repack_case.layout == PackedLayout::kGptq) {
        repack.perm.resize(static_cast<size_t>(repack.size_k));
        std::iota(repack.perm.begin(), repack.perm.end(), 0);
        std::ranges::shuffle(repack.perm, random);
      }
      check_repack(random, repack_case, repack);
    }
  }
}

TEST_CASE("Marlin repacking gives the words that the kernels were seen to read") {
  // Made with upstream's own packing, from (3 k + 5 n + n / 16) mod 2^bits.
  const std::vector<uint32_t> expected[2] = {
      {0x3bb30880, 0x4cc41991, 0x5dd52aa2, 0x6ee63bb3, 0x91196ee6, 0xa22a7ff7, 0xb33b8008, 0xc44c9119},
      {0x1b031800, 0x432b4028, 0x6c546951, 0x947c9179, 0xbda5baa2, 0xe5cde2ca, 0x0ef60bf3, 0x361e331b}};
  for (const int num_bits : {4, 8}) {
    MarlinRepack repack{PackedLayout::kGptq, num_bits, false, 128, 128, 128, 128, {}};
    const int64_t values = 32 / num_bits;
    std::vector<uint32_t> words(static_cast<size_t>(128 * 128 / values));
    for (int64_t k = 0; k < 128; ++k) {
      for (int64_t n = 0; n < 128; ++n) {
        const auto value = static_cast<uint32_t>((3 * k + 5 * n + n / 16) % (1 << num_bits));
        words[static_cast<size_t>(k / values * 128 + n)] |= value << (num_bits * (k % values));
      }
    }
    std::vector<uint32_t> out(words.size());
    const auto op = make_marlin_repack(
        repack, {reinterpret_cast<std::byte*>(out.data()), 8, 128 * 16 / values * 4, 128 * 16 / values * 4});
    run_op(*op, reinterpret_cast<const std::byte*>(words.data()), 4 * 128, 1);
    CHECK(std::equal(expected[num_bits == 8].begin(), expected[num_bits == 8].end(), out.begin()));
  }
}

TEST_CASE("Marlin repacking refuses sizes and permutations that don't fit") {
  std::byte memory{};
  const auto refused = [&](MarlinRepack repack, OpOutput output) {
    CHECK_THROWS_AS(make_marlin_repack(std::move(repack), output), std::invalid_argument);
  };
  const OpOutput output{&memory, 1, 512, 512};
  const MarlinRepack right{PackedLayout::kGptq, 4, false, 16, 64, 16, 64, {}};
  CHECK(make_marlin_repack(right, output) != nullptr);
  MarlinRepack wrong = right;
  wrong.num_bits = 5;
  refused(wrong, output);
  wrong = right;
  wrong.size_k = wrong.padded_k = 24;
  refused(wrong, output);
  wrong = right;
  wrong.size_n = 65;
  refused(wrong, output);
  wrong = right;
  wrong.size_k = 12;
  refused(wrong, output);
  wrong = right;
  wrong.perm.assign(16, 16);
  refused(wrong, output);
  refused(right, {&memory, 1, 256, 256});
}

// ---- bytes through tables

TEST_CASE("each row of bytes goes through its part's table") {
  Random random(3);
  for (int i = 0; i < 40; ++i) {
    const int64_t rows = uniform(random, 1, 9);
    const int64_t row_bytes = uniform(random, 1, 200);
    std::vector<ByteMapPart> parts;
    while (parts.empty() || parts.back().end_row < rows) {
      const int64_t first = parts.empty() ? 0 : parts.back().end_row;
      parts.push_back({uniform(random, first + 1, rows), {}});
      ByteTable& table = parts.back().table;
      if (i % 2 == 0) {
        std::ranges::generate(table, [&] { return static_cast<uint8_t>(random()); });
      } else {  // few bytes replaced, up to more than have a path of their own
        std::iota(table.begin(), table.end(), uint8_t{0});
        for (int64_t k = uniform(random, 0, 6); k > 0; --k) table[random() % 256] = static_cast<uint8_t>(random());
      }
    }
    const Source source(random, rows, row_bytes);
    Memory expected;
    for (int64_t r = 0; r < rows; ++r) {
      const auto part = std::ranges::find_if(parts, [r](const ByteMapPart& part) { return r < part.end_row; });
      for (int64_t c = 0; c < row_bytes; ++c) {
        expected.push_back(std::byte{part->table[static_cast<size_t>(source.data()[r * source.stride + c])]});
      }
    }
    Target target(random, rows, row_bytes);
    for (const Simd simd : kAll) {
      const SimdLimit limit(simd);
      target.reset();
      run_in_parts(random, *make_byte_map(parts, row_bytes, target.output()), source);
      CHECK(target.rows() == expected);
    }
  }
}

TEST_CASE("e4m3fn bytes become e4m3fnuz bytes on every machine alike") {
  Random random(5);
  Memory bytes(4096);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  std::ranges::shuffle(bytes, random);
  for (const bool keep_nan : {true, false}) {
    for (const Simd simd : kAll) {
      CAPTURE(static_cast<int>(simd));
      const SimdLimit limit(simd);
      Memory out(bytes.size());
      run_op(*make_byte_map({{1, e4m3fn_to_e4m3fnuz_table(keep_nan)}}, 4096, {out.data(), 1, 4096, 4096}), bytes.data(),
             4096, 1);
      for (size_t i = 0; i < bytes.size(); ++i) {
        CHECK(out[i] == std::byte{e4m3fn_to_e4m3fnuz(static_cast<uint8_t>(bytes[i]), keep_nan)});
      }
    }
  }
}

// ---- quantising

// Numbers of every magnitude, and a few that are none.
void make_floats(Random& random, ElementType type, Memory& memory, int64_t offset) {
  const int64_t item = element_bytes(type);
  for (int64_t at = offset; at + item <= static_cast<int64_t>(memory.size()); at += item) {
    uint32_t bits = static_cast<uint32_t>(random());
    if (type == ElementType::kFloat32) {
      if (uniform(random, 0, 3) != 0) bits = (bits & 0x8fffffff) | 0x30000000;
      std::memcpy(memory.data() + at, &bits, 4);
    } else {
      auto half = static_cast<uint16_t>(bits);
      if (type == ElementType::kBFloat16 && uniform(random, 0, 3) != 0) half = (half & 0x8fff) | 0x3000;
      std::memcpy(memory.data() + at, &half, 2);
    }
  }
}

float float_at(const Source& source, ElementType type, int64_t row, int64_t column) {
  const std::byte* from = source.data() + row * source.stride + column * element_bytes(type);
  if (type == ElementType::kFloat32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from, 2);
  return std::bit_cast<float>(type == ElementType::kFloat16 ? float16_to_float32(half) : bfloat16_to_float32(half));
}

uint8_t quantized_by_definition(QuantizedType type, float value, float limit, bool keep_nan) {
  if (std::isnan(value) && !keep_nan) value = limit;
  switch (type) {
    case QuantizedType::kE4M3FN:
      return std::isnan(value) ? 0x7f : nearest(Fp8::kE4M3FN, value, limit);
    case QuantizedType::kE4M3FNUZ:
      return std::isnan(value) ? 0x80 : nearest(Fp8::kE4M3FNUZ, value, limit);
    default:
      if (std::isnan(value)) return 0;
      return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(std::clamp(value, -limit, limit))));
  }
}

TEST_CASE("each block is quantised with its own scale, found or given, on every machine alike") {
  Random random(4);
  for (int i = 0; i < 300; ++i) {
    Quantize quantize;
    quantize.src_type = std::vector{ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}[i % 3];
    quantize.type = std::vector{QuantizedType::kE4M3FN, QuantizedType::kE4M3FNUZ, QuantizedType::kInt8}[i / 3 % 3];
    quantize.scaling = i % 2 == 0 ? Scaling::kMultiply : Scaling::kDivide;
    quantize.limit = std::vector{448.0f, 224.0f, 127.0f}[i / 3 % 3];
    quantize.rows = uniform(random, 1, 20);
    quantize.columns = uniform(random, 1, 150);
    quantize.block_rows = uniform(random, 1, 24);
    quantize.block_columns = uniform(random, 1, 160);
    quantize.keep_nan = i % 4 != 0;
    const bool e8m0 = i % 5 == 0;
    ScaleRule rule{quantize.limit, 1e-4f, 0, 0, e8m0};
    if (i % 7 == 0) rule = {quantize.limit, 0, 1 / (quantize.limit * 512), 3.0f, e8m0};
    CAPTURE(i);

    Source source(random, quantize.rows, quantize.columns * element_bytes(quantize.src_type));
    make_floats(random, quantize.src_type, source.memory, source.offset);
    const int64_t block_rows = (quantize.rows + quantize.block_rows - 1) / quantize.block_rows;
    const int64_t block_columns = (quantize.columns + quantize.block_columns - 1) / quantize.block_columns;

    std::vector<float> amaxes(static_cast<size_t>(block_rows * block_columns));
    const auto block_of = [&](int64_t r, int64_t c) {
      return static_cast<size_t>(r / quantize.block_rows * block_columns + c / quantize.block_columns);
    };
    float amax = 0;
    for (int64_t r = 0; r < quantize.rows; ++r) {
      for (int64_t c = 0; c < quantize.columns; ++c) {
        const float magnitude = std::abs(float_at(source, quantize.src_type, r, c));
        if (!std::isfinite(magnitude)) continue;
        float& largest = amaxes[block_of(r, c)];
        largest = std::max(largest, magnitude);
        amax = std::max(amax, magnitude);
      }
    }
    std::vector<float> scales;
    Memory expected_scales;
    for (const float block_amax : amaxes) {
      scales.push_back(scale_from_amax(rule, block_amax));
      const auto bytes = std::as_bytes(std::span(&scales.back(), 1));
      if (e8m0) {
        expected_scales.push_back(static_cast<std::byte>(std::ilogb(scales.back()) + 127));
      } else {
        expected_scales.insert(expected_scales.end(), bytes.begin(), bytes.end());
      }
    }
    Memory expected;
    for (int64_t r = 0; r < quantize.rows; ++r) {
      for (int64_t c = 0; c < quantize.columns; ++c) {
        const float scale = scales[block_of(r, c)];
        const float value = float_at(source, quantize.src_type, r, c);
        const float scaled = quantize.scaling == Scaling::kMultiply ? value * (1 / scale) : value / scale;
        expected.push_back(
            std::byte{quantized_by_definition(quantize.type, scaled, quantize.limit, quantize.keep_nan)});
      }
    }

    Target weight(random, quantize.rows, quantize.columns);
    Target scale_target(random, block_rows, block_columns * (e8m0 ? 1 : 4));
    for (const Simd simd : kAll) {
      CAPTURE(static_cast<int>(simd));
      const SimdLimit limit(simd);
      weight.reset();
      scale_target.reset();
      run_in_parts(random, *make_quantize(quantize, rule, e8m0, weight.output(), scale_target.output()), source);
      CHECK(weight.rows() == expected);
      CHECK(scale_target.rows() == expected_scales);

      weight.reset();
      scale_target.reset();
      run_in_parts(random, *make_quantize(quantize, rule, e8m0, weight.output(), {}), source);
      CHECK(weight.rows() == expected);
      run_in_parts(random, *make_quantize(quantize, rule, e8m0, {}, scale_target.output()), source);
      CHECK(scale_target.rows() == expected_scales);

      weight.reset();
      run_in_parts(random, *make_quantize_with(quantize, scales, weight.output()), source);
      CHECK(weight.rows() == expected);

      float found = 0;
      run_in_parts(random, *make_amax(quantize.src_type, quantize.rows, quantize.columns, &found), source);
      CHECK(found == amax);
    }
  }
}

TEST_CASE("an all-zero tensor with scale 0 stays zero, or becomes the limit as in CUDA kernels") {
  const float zeros[8] = {};
  for (const bool keep_nan : {true, false}) {
    Quantize quantize;
    quantize.rows = 1;
    quantize.columns = 8;
    quantize.block_columns = 8;
    quantize.keep_nan = keep_nan;
    std::byte out[8];
    run_op(*make_quantize_with(quantize, {0.0f}, {out, 1, 8, 8}), reinterpret_cast<const std::byte*>(zeros), 32, 1);
    CHECK(
        std::ranges::all_of(out, [&](std::byte byte) { return byte == (keep_nan ? std::byte{0} : std::byte{0x7e}); }));
  }
}

}  // namespace
}  // namespace weightlift

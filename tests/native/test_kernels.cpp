// The kernels, thread for thread on the host (walk_kernels.h), against what the host's versions make.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "plan/geometry.h"
#include "transform/convert.h"
#include "transform/copy.h"
#include "transform/cuda/copy_kernels.h"
#include "transform/map_bytes.h"
#include "transform/marlin_repack.h"
#include "transform/quantize.h"
#include "walk_kernels.h"

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

namespace weightlift {
namespace {

using Random = std::mt19937_64;
using Memory = std::vector<std::byte>;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

template <typename Value>
Value one_of(Random& random, std::initializer_list<Value> values) {
  return values.begin()[uniform(random, 0, static_cast<int64_t>(values.size()) - 1)];
}

Memory random_memory(Random& random, int64_t bytes) {
  Memory memory(static_cast<size_t>(bytes));
  std::ranges::generate(memory, [&] { return static_cast<std::byte>(random()); });
  return memory;
}

// Where the first byte of something lies: aligned to 16, as mostly, or to less, or not at all.
int64_t random_start(Random& random) { return 64 + one_of<int64_t>(random, {0, 0, 8, 4, 2, uniform(random, 0, 15)}); }
int64_t random_gap(Random& random) { return one_of<int64_t>(random, {0, 0, 16, 8, 4, 2, uniform(random, 0, 33)}); }

// Rows of an op's output, twice: one for the host's version, one for the kernel. What surrounds them must stay.
class Outputs {
 public:
  Outputs(Random& random, int64_t rows, int64_t row_bytes)
      : start_(random_start(random)), rows_(rows), row_bytes_(row_bytes), stride_(row_bytes + random_gap(random)) {
    for (Memory& memory : memories_) memory.resize(static_cast<size_t>(start_ + rows * stride_ + 64));
    memories_[0] = random_memory(random, static_cast<int64_t>(memories_[0].size()));
    memories_[1] = memories_[0];
    // Both at the same place among multiples of 16.
    for (Memory& memory : memories_) REQUIRE(reinterpret_cast<uintptr_t>(memory.data()) % 16 == 0);
  }

  OpOutput host() { return {memories_[0].data() + start_, rows_, row_bytes_, stride_}; }
  OpOutput device() { return {memories_[1].data() + start_, rows_, row_bytes_, stride_}; }
  bool same() const { return memories_[0] == memories_[1]; }

 private:
  int64_t start_;
  int64_t rows_;
  int64_t row_bytes_;
  int64_t stride_;
  Memory memories_[2];
};

// Runs `host`, and launches `device`, part by part in any order, each from memory that ends where the part does.
void run_both(Random& random, const Op& host, const Op& device) {
  const auto [num_rows, row_bytes, granule_rows] = host.source();
  REQUIRE(device.source().granule_rows == granule_rows);
  const int64_t stride = row_bytes + random_gap(random);
  std::vector<int64_t> starts{0};
  const int64_t most = one_of<int64_t>(random, {1, 4, num_rows});
  while (starts.back() < num_rows) {
    starts.push_back(std::min(num_rows, starts.back() + granule_rows * uniform(random, 1, most)));
  }
  Memory source = random_memory(random, num_rows * stride);
  if (uniform(random, 0, 9) == 0) std::ranges::fill(source, std::byte{0});
  std::vector<size_t> order(starts.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, random);
  for (const size_t part : order) {
    const int64_t rows = starts[part + 1] - starts[part];
    const int64_t start = random_start(random);
    const int64_t bytes = (rows - 1) * stride + row_bytes;
    const auto copy = std::make_unique<std::byte[]>(static_cast<size_t>(start + bytes));  // ends where the part does
    std::memcpy(copy.get() + start, source.data() + starts[part] * stride, static_cast<size_t>(bytes));
    host.run(copy.get() + start, stride, starts[part], rows);
    REQUIRE(device.launch(copy.get() + start, stride, starts[part], rows, nullptr) == 0);
  }
}

// ---- parts that kernels are made of

TEST_CASE("a Divisor divides") {
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const int64_t divisor = uniform(random, 1, int64_t{1} << uniform(random, 0, 31)) & 0x7fffffff;
    if (divisor == 0) continue;
    const Divisor by(divisor);
    const int64_t near = divisor * uniform(random, 0, 0x7fffffff / divisor) + uniform(random, -1, 1);
    for (const int64_t n : {uniform(random, 0, 0x7fffffff), near, int64_t{0x7fffffff}, int64_t{0}}) {
      if (n < 0 || n > 0x7fffffff) continue;
      CHECK(by.divide(static_cast<uint32_t>(n)) == n / divisor);
      CHECK(by.modulo(static_cast<uint32_t>(n)) == n % divisor);
    }
  }
}

TEST_CASE("the tiles of rows have each unit once, also where there are more than 2^31 of them") {
  Random random(2);
  for (const auto& [rows, units] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 1024}, {1, 1025}, {1000, 1}, {7, 3}, {3, 2049}, {5, 683}, {2, 1023}, {300, 40}}) {
    const RowTiles tiles(rows, units);
    std::vector<int> visits(static_cast<size_t>(rows * units));
    for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
      for (int thread = 0; thread < kThreads; ++thread) {
        tiles.visit(tile, thread,
                    [&](int64_t row, int64_t unit) { ++visits[static_cast<size_t>(row * units + unit)]; });
      }
    }
    CHECK(std::ranges::all_of(visits, [](int count) { return count == 1; }));
  }
  for (const auto& [rows, units] : std::vector<std::pair<int64_t, int64_t>>{
           {1, int64_t{1} << 33}, {int64_t{1} << 33, 1}, {(int64_t{1} << 31) + 5, 37}, {3, (int64_t{1} << 31) + 5}}) {
    const RowTiles tiles(rows, units);
    int64_t last_row = 0;
    int64_t last_unit = 0;
    for (int thread = 0; thread < kThreads; ++thread) {
      tiles.visit(tiles.tiles() - 1, thread, [&](int64_t row, int64_t unit) {
        last_row = std::max(last_row, row);
        last_unit = std::max(last_unit, unit);
      });
    }
    CHECK(last_row == rows - 1);
    CHECK(last_unit == units - 1);
  }
}

TEST_CASE("float32 and float64 become each other as the host converts them, NaN included") {
  Random random(3);
  for (int i = 0; i < 100000; ++i) {
    auto single = static_cast<uint32_t>(random());
    auto both = random();
    if (i % 4 == 0) single |= 0x7f800000;
    if (i % 4 == 1) both |= 0x7ff0000000000000;
    if (i % 4 == 2) both = (both & 0x800fffffffffffff) | static_cast<uint64_t>(uniform(random, 860, 900)) << 52;
    Memory memory(8);
    std::memcpy(memory.data(), &single, 4);
    uint64_t widened;
    Conversion(ElementType::kFloat32, ElementType::kFloat64)
        .convert(memory.data(), reinterpret_cast<std::byte*>(&widened), 1);
    CHECK(float32_to_float64(single) == widened);
    std::memcpy(memory.data(), &both, 8);
    uint32_t narrowed;
    Conversion(ElementType::kFloat64, ElementType::kFloat32)
        .convert(memory.data(), reinterpret_cast<std::byte*>(&narrowed), 1);
    CHECK(float64_to_float32(both) == narrowed);
  }
}

TEST_CASE("what is divided by a reciprocal and corrected is quantised as what is divided") {
  Random random(4);
  const auto same = [](float value, float divisor) {
    if (!may_divide_by(divisor)) return true;
    const float exact = value / divisor;
    const float found = divided(value, divisor, 1.0f / divisor);
    if (std::isnan(exact)) return std::isnan(found);
    if (std::abs(exact) >= 0x1p60f) return std::abs(found) >= 0x1p59f && std::signbit(found) == std::signbit(exact);
    if (std::abs(exact) < 0x1p-20f) return std::abs(found) < 0x1p-19f && std::signbit(found) == std::signbit(exact);
    return std::bit_cast<uint32_t>(found) == std::bit_cast<uint32_t>(exact);
  };
  for (const float value : {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-45f, -1e-45f, 3.4e38f, -1.0f}) {
    for (const float divisor : {1.0f, 3.0f, 0x1p-80f, 0x1p100f, -7.0f, 1e-20f}) CHECK(same(value, divisor));
  }
  int64_t wrong = 0;
  for (int i = 0; i < 2000000; ++i) {
    const auto divisor = std::bit_cast<float>(static_cast<uint32_t>(random()));
    float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (i % 2 == 0) {  // beside what a rounding of the quotient turns at
      value = divisor * static_cast<float>(uniform(random, 1, 16)) * 0.25f *
              (1.0f + static_cast<float>(uniform(random, -2, 2)) * 0x1p-23f);
    }
    if (i % 4 == 1 && std::isnormal(value) && std::isnormal(divisor)) {
      value = std::ldexp(value, std::ilogb(divisor) - std::ilogb(value) + static_cast<int>(uniform(random, -12, 12)));
    }
    wrong += same(value, divisor) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

// ---- copies

// The geometry of a copy: sizes, and strides in elements, which may be those of a transposed or an expanded tensor.
struct Geometry {
  std::vector<Dim> dims;
  int64_t src_bytes;
  int64_t dst_bytes;
};

Geometry random_geometry(Random& random, int64_t src_item, int64_t dst_item) {
  const int64_t num_dims = uniform(random, 0, 5);
  std::vector<int64_t> sizes;
  int64_t elements = 1;
  for (int64_t i = 0; i < num_dims; ++i) {
    sizes.push_back(one_of<int64_t>(random, {1, 2, 3, 7, 16, 33, uniform(random, 1, 100), uniform(random, 1, 3000)}));
    if (elements * sizes.back() > 20000) sizes.back() = uniform(random, 1, 3);
    elements *= sizes.back();
  }
  Geometry geometry{{}, src_item, dst_item};
  // Either side: the dimensions in some order of nesting, with gaps.
  const auto strides = [&](int64_t item, bool may_repeat, int64_t& bytes) {
    std::vector<size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::reverse(order);
    if (uniform(random, 0, 2) == 0) std::ranges::shuffle(order, random);
    std::vector<int64_t> result(sizes.size());
    int64_t step = item * one_of<int64_t>(random, {1, 1, 1, 2, 3});
    bytes = item;
    for (const size_t dim : order) {
      if (may_repeat && uniform(random, 0, 9) == 0) continue;  // expanded
      result[dim] = step;
      bytes += (sizes[dim] - 1) * step;
      step *= sizes[dim];
      if (uniform(random, 0, 3) == 0) step += item * uniform(random, 0, 9);
    }
    return result;
  };
  const auto src = strides(src_item, true, geometry.src_bytes);
  const auto dst = strides(dst_item, false, geometry.dst_bytes);
  for (size_t i = 0; i < sizes.size(); ++i) geometry.dims.push_back({sizes[i], src[i], dst[i]});
  return geometry;
}

void check_copies(Random& random, int count, const std::function<std::pair<ElementType, ElementType>()>& types) {
  std::vector<Memory> sources;
  std::vector<Memory> before;
  std::vector<std::pair<Memory, Memory>> destinations;  // of the host, of the device
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::vector<DeviceCopy> copies;
  for (int i = 0; i < count; ++i) {
    const auto [src_type, dst_type] = types();
    const Geometry geometry = random_geometry(random, element_bytes(src_type), element_bytes(dst_type));
    const int64_t src_start = random_start(random);
    const int64_t dst_start = random_start(random);
    sources.push_back(random_memory(random, src_start + geometry.src_bytes));
    for (const int64_t step : {2, 4, 8}) {  // zeros, of parts of complex numbers too
      for (int64_t at = src_start; at + step <= src_start + geometry.src_bytes; at += step) {
        if (random() % 8 == 0) std::fill_n(sources.back().begin() + at, step, std::byte{0});
      }
    }
    const Memory to = random_memory(random, dst_start + geometry.dst_bytes + 32);
    destinations.emplace_back(to, to);
    const int64_t file_offset = uniform(random, 0, int64_t{1} << 40);
    const auto transfer_to = [&](Memory& memory) {
      return make_transfer(0, 0, src_type, file_offset, dst_type, memory.data() + dst_start, geometry.dims);
    };
    const Transfer host = transfer_to(destinations.back().first);
    int64_t first = 0;
    int64_t last = host.num_elements();
    if (uniform(random, 0, 1) == 0) {
      first = uniform(random, 0, last);
      last = uniform(random, first, last);
    }
    // Of a part, only its own bytes are at hand.
    const std::byte* src = sources.back().data() + src_start;
    copy_elements(host, first, last, src, file_offset);
    transfers.push_back(std::make_unique<Transfer>(transfer_to(destinations.back().second)));
    copies.push_back({transfers.back().get(), first, last, src, file_offset});
  }
  REQUIRE(launch_copies(copies, nullptr) == 0);
  for (const auto& [host, device] : destinations) CHECK(host == device);
}

TEST_CASE("strided copies of any size, place and part are those of the host") {
  Random random(10);
  for (int i = 0; i < 60; ++i) {
    check_copies(random, 20, [&] {
      const auto type = one_of(random, {ElementType::kBytes1, ElementType::kBytes2, ElementType::kBytes4,
                                        ElementType::kBytes8, ElementType::kBytes16, ElementType::kBFloat16});
      return std::pair(type, type);
    });
  }
}

TEST_CASE("casts between any two types are those of the host") {
  Random random(11);
  std::vector<std::pair<ElementType, ElementType>> pairs;
  for (int src = 0; src < kNumElementTypes; ++src) {
    for (int dst = 0; dst < kNumElementTypes; ++dst) {
      const auto pair = std::pair(static_cast<ElementType>(src), static_cast<ElementType>(dst));
      if (src != dst && can_convert(pair.first, pair.second)) pairs.push_back(pair);
    }
  }
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < pairs.size(); i += 20) {
      size_t next = i;
      check_copies(random, static_cast<int>(std::min<size_t>(20, pairs.size() - i)), [&] { return pairs[next++]; });
    }
  }
}

TEST_CASE("a transposition goes through tiles, whatever the size of its elements") {
  Random random(12);
  for (const auto type : {ElementType::kBytes1, ElementType::kBytes2, ElementType::kBytes4, ElementType::kBytes8,
                          ElementType::kBytes16}) {
    for (const auto& [rows, columns] :
         std::vector<std::pair<int64_t, int64_t>>{{64, 64}, {65, 130}, {8, 300}, {31, 33}}) {
      const int64_t item = element_bytes(type);
      const Memory from = random_memory(random, 64 + rows * columns * item);
      Memory host(static_cast<size_t>(rows * columns * item));
      Memory device = host;
      const auto transfer = [&](Memory& to) {
        return make_transfer(0, 0, type, 0, type, to.data(),
                             {{rows, columns * item, item}, {columns, item, rows * item}});
      };
      copy_elements(transfer(host), 0, rows * columns, from.data(), 0);
      const Transfer on_device = transfer(device);
      const DeviceCopy copy{&on_device, 0, rows * columns, from.data(), 0};
      REQUIRE(launch_copies({&copy, 1}, nullptr) == 0);
      CHECK(host == device);
    }
  }
}

TEST_CASE("many small copies share launches, and the first status other than 0 is returned") {
  Random random(13);
  std::vector<Transfer> transfers;
  const Memory from = random_memory(random, 1000);
  Memory to(1000);
  for (int64_t i = 0; i < 100; ++i) {
    transfers.push_back(
        make_transfer(i, 0, ElementType::kBytes1, 10 * i, ElementType::kBytes1, to.data() + 10 * i, {{10, 1, 1}}));
  }
  std::vector<DeviceCopy> copies;
  for (const Transfer& transfer : transfers) copies.push_back({&transfer, 0, 10, from.data(), 0});
  num_launches = 0;
  CHECK(launch_copies(copies, nullptr) == 0);
  CHECK(num_launches == (100 + CopyKernel<false>::kMaxBoxes - 1) / CopyKernel<false>::kMaxBoxes);
  CHECK(to == from);
  CHECK(launch_copies({}, nullptr) == 0);
  failing_status = 700;
  num_launches = 0;
  CHECK(launch_copies(copies, nullptr) == 700);
  CHECK(num_launches == 1);
  failing_status = 0;
}

// ---- ops

TEST_CASE("byte maps are those of the host") {
  Random random(20);
  for (int i = 0; i < 200; ++i) {
    const int64_t row_bytes = one_of<int64_t>(random, {1, 15, 16, 17, 64, 4096, uniform(random, 1, 700)});
    std::vector<ByteMapPart> parts;
    int64_t rows = 0;
    for (int64_t part = uniform(random, 1, 3); part > 0; --part) {
      rows += uniform(random, 1, 9);
      ByteTable table;
      std::ranges::generate(table, [&] { return static_cast<uint8_t>(random()); });
      parts.push_back({rows, table});
    }
    Outputs outputs(random, rows, row_bytes);
    run_both(random, *make_byte_map(parts, row_bytes, outputs.host()),
             *make_byte_map(parts, row_bytes, outputs.device()));
    CHECK(outputs.same());
  }
}

TEST_CASE("requantising with scales in memory is that with known ones, and makes NaN where a scale is none") {
  Random random(21);
  for (const Fp8 format : {Fp8::kE4M3FN, Fp8::kE4M3FNUZ}) {
    for (const Rounding rounding : {Rounding::kExact, Rounding::kThroughFp16}) {
      for (int i = 0; i < 60; ++i) {
        const float limit = format == Fp8::kE4M3FN ? 448.0f : 224.0f;
        std::vector<int64_t> end_rows;
        std::vector<float> scales;
        int64_t rows = 0;
        for (int64_t part = uniform(random, 1, 3); part > 0; --part) {
          end_rows.push_back(rows += uniform(random, part == 1 ? 1 : 0, 5));
          scales.push_back(
              std::ldexp(static_cast<float>(uniform(random, 1, 1000)), static_cast<int>(uniform(random, -20, 3))));
        }
        const float largest = *std::ranges::max_element(scales);
        const int64_t row_bytes = uniform(random, 1, 300);
        std::vector<ByteMapPart> parts;
        for (size_t part = 0; part < scales.size(); ++part) {
          if (end_rows[part] == (parts.empty() ? 0 : parts.back().end_row)) continue;
          parts.push_back({end_rows[part], requantize_table(format, scales[part], largest, limit, rounding)});
        }
        const Requantize requantize{format, rounding, limit, -448.0f};
        const auto referring = [&](OpOutput output) {
          return make_requantize(requantize, end_rows, scales.data(), row_bytes, output);
        };
        Outputs outputs(random, rows, row_bytes);
        run_both(random, *make_byte_map(parts, row_bytes, outputs.host()), *referring(outputs.device()));
        CHECK(outputs.same());
        scales[static_cast<size_t>(uniform(random, 0, static_cast<int64_t>(scales.size()) - 1))] =
            one_of(random, {-1.0f, 0.0f, INFINITY, -INFINITY, NAN, -448.0f});
        Outputs wrong(random, rows, row_bytes);
        run_both(random, *referring(wrong.host()), *referring(wrong.device()));
        CHECK(wrong.same());
      }
    }
  }
  const float scales[] = {0.5f, -1.0f, 2.0f};
  RequantizeRule rule{scales, 3, 1, Fp8::kE4M3FN, Rounding::kExact, std::bit_cast<uint32_t>(448.0f), -448.0f};
  CHECK(requantized(rule, 0x38) == 0x7f);
  rule.part = 2;
  CHECK(requantized(rule, 0x38) == 0x38);
  const float one_for_all[] = {0.5f, -448.0f};
  rule.scales = one_for_all;
  rule.num_scales = 2;
  CHECK(requantized(rule, 0x31) == 0x31);
}

TEST_CASE("the Marlin repack of every layout, with padding and in parts, is the host's") {
  Random random(22);
  for (const PackedLayout layout : {PackedLayout::kGptq, PackedLayout::kAwq, PackedLayout::kNMajor}) {
    for (const int num_bits : {4, 8}) {
      for (const bool is_a_8bit : {false, true}) {
        for (int i = 0; i < 12; ++i) {
          MarlinRepack repack;
          repack.layout = layout;
          repack.num_bits = num_bits;
          repack.is_a_8bit = is_a_8bit;
          repack.padded_k = (is_a_8bit ? 32 : 16) * uniform(random, 1, 20);
          repack.padded_n = (is_a_8bit ? 32 : 64) * uniform(random, 1, 20);
          const int64_t values = 32 / num_bits;
          const bool pads = i % 2 != 0;
          repack.size_k = pads ? values * uniform(random, 1, repack.padded_k / values) : repack.padded_k;
          repack.size_n = pads ? values * uniform(random, 1, repack.padded_n / values) : repack.padded_n;
          if (layout != PackedLayout::kAwq && pads) repack.size_n = uniform(random, 1, repack.padded_n);
          std::vector<int32_t> perm(static_cast<size_t>(repack.size_k));
          std::iota(perm.begin(), perm.end(), 0);
          std::ranges::shuffle(perm, random);
          if (layout == PackedLayout::kGptq && i % 4 == 2) {
            repack.perm = perm;
            repack.device_perm = perm.data();
          }
          Outputs outputs(random, repack.padded_k / (is_a_8bit ? 32 : 16),
                          repack.padded_n / (is_a_8bit ? 32 : 64) * (4096 / values));
          run_both(random, *make_marlin_repack(repack, outputs.host()), *make_marlin_repack(repack, outputs.device()));
          CHECK(outputs.same());
        }
      }
    }
  }
}

TEST_CASE("an act-order permutation that is not on the device is refused, and one that names no row gives zeros") {
  MarlinRepack repack;
  repack.size_k = repack.padded_k = 16;
  repack.size_n = repack.padded_n = 64;
  repack.perm.resize(16);
  std::iota(repack.perm.begin(), repack.perm.end(), 0);
  Memory source(512, std::byte{0xff});
  Memory result(512);
  const OpOutput output{result.data(), 1, 512, 512};
  CHECK(make_marlin_repack(repack, output)->launch(source.data(), 256, 0, 2, nullptr) == kDeviceNotSupported);
  const std::vector<int32_t> wrong(16, 16);
  repack.perm.clear();
  repack.device_perm = wrong.data();
  std::ranges::fill(result, std::byte{1});
  REQUIRE(make_marlin_repack(repack, output)->launch(source.data(), 256, 0, 2, nullptr) == 0);
  CHECK(std::ranges::count(result, std::byte{0}) == 512);
}

struct QuantizeCase {
  Quantize quantize;
  ScaleRule rule;
  bool e8m0_scales = false;
};

QuantizeCase random_quantize(Random& random) {
  QuantizeCase one;
  Quantize& quantize = one.quantize;
  quantize.src_type = one_of(random, {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16});
  quantize.type = one_of(random, {QuantizedType::kE4M3FN, QuantizedType::kE4M3FNUZ, QuantizedType::kInt8});
  quantize.limit = quantize.type == QuantizedType::kE4M3FN ? 448 : quantize.type == QuantizedType::kInt8 ? 127 : 224;
  quantize.scaling = one_of(random, {Scaling::kMultiply, Scaling::kDivide});
  quantize.keep_nan = uniform(random, 0, 1) == 0;
  quantize.rows = uniform(random, 1, 40);
  quantize.columns = one_of<int64_t>(random, {16, 32, 128, 384, uniform(random, 1, 600), uniform(random, 3000, 9000)});
  if (quantize.columns > 600) quantize.rows = uniform(random, 1, 4);
  quantize.block_rows = one_of<int64_t>(random, {1, 1, quantize.rows, 128, uniform(random, 1, 9)});
  quantize.block_columns = one_of<int64_t>(random, {16, 32, 128, quantize.columns, uniform(random, 1, 200)});
  one.rule = {quantize.limit, one_of(random, {0.0f, 1e-4f}), one_of(random, {0.0f, 1e-3f}),
              one_of(random, {0.0f, 50.0f}), uniform(random, 0, 2) == 0};
  one.e8m0_scales = one.rule.power_of_two && uniform(random, 0, 1) == 0;
  return one;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

TEST_CASE("quantising with scales found is the host's, scales included") {
  Random random(30);
  for (int i = 0; i < 400; ++i) {
    const auto [quantize, rule, e8m0_scales] = random_quantize(random);
    const int64_t block_rows = ceil_div(quantize.rows, quantize.block_rows);
    const int64_t row_blocks = ceil_div(quantize.columns, quantize.block_columns);
    Outputs weight(random, quantize.rows, quantize.columns);
    Outputs scales(random, block_rows, row_blocks * (e8m0_scales ? 1 : 4));
    const int64_t wanted = uniform(random, 0, 4);  // 0: the weight alone, 1: the scales alone
    std::vector<float> amaxes(static_cast<size_t>(block_rows * row_blocks), NAN);
    const bool by_steps = block_rows * row_blocks < 20 && uniform(random, 0, 1) == 0;
    const auto make = [&](OpOutput weight_output, OpOutput scales_output) {
      return make_quantize(quantize, rule, e8m0_scales, wanted == 1 ? OpOutput{} : weight_output,
                           wanted == 0 ? OpOutput{} : scales_output, by_steps ? amaxes.data() : nullptr);
    };
    run_both(random, *make(weight.host(), scales.host()), *make(weight.device(), scales.device()));
    CHECK(weight.same());
    CHECK(scales.same());
  }
}

TEST_CASE("quantising with scales given, known or in memory, is the host's") {
  Random random(31);
  for (int i = 0; i < 300; ++i) {
    const Quantize quantize = random_quantize(random).quantize;
    std::vector<float> scales(static_cast<size_t>(ceil_div(quantize.rows, quantize.block_rows) *
                                                  ceil_div(quantize.columns, quantize.block_columns)));
    std::ranges::generate(scales, [&] {
      return one_of(random, {0.01f, 1.0f, 0.0f, std::bit_cast<float>(static_cast<uint32_t>(random())), 3e38f, 1e-42f});
    });
    Outputs known(random, quantize.rows, quantize.columns);
    run_both(random, *make_quantize_with(quantize, scales, known.host()),
             *make_quantize_with(quantize, scales.data(), known.device()));
    CHECK(known.same());
    Outputs referred(random, quantize.rows, quantize.columns);
    run_both(random, *make_quantize_with(quantize, scales.data(), referred.host()),
             *make_quantize_with(quantize, scales.data(), referred.device()));
    CHECK(referred.same());
  }
}

TEST_CASE("the largest magnitude is the host's, and several ops may share it") {
  Random random(32);
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (int i = 0; i < 30; ++i) {
      const int64_t rows = uniform(random, 1, 30);
      const int64_t columns = one_of<int64_t>(random, {1, 16, 33, 4096, uniform(random, 1, 500)});
      float host = one_of(random, {0.0f, 1e-30f, 1e38f});
      float device = host;
      run_both(random, *make_amax(type, rows, columns, &host), *make_amax(type, rows, columns, &device));
      CHECK(host == device);
    }
  }
}

TEST_CASE("an op whose kernel can't be launched says so") {
  Memory source(64);
  Memory result(64);
  float amax = 0;
  failing_status = 98;
  const OpOutput output{result.data(), 1, 64, 64};
  CHECK(make_byte_map({{1, {}}}, 64, output)->launch(source.data(), 64, 0, 1, nullptr) == 98);
  CHECK(make_amax(ElementType::kFloat32, 1, 16, &amax)->launch(source.data(), 64, 0, 1, nullptr) == 98);
  Quantize quantize;
  quantize.rows = 1;
  quantize.columns = quantize.block_columns = 16;
  const OpOutput weight{result.data(), 1, 16, 16};
  CHECK(make_quantize(quantize, {}, false, weight, {})->launch(source.data(), 64, 0, 1, nullptr) == 98);
  CHECK(make_quantize(quantize, {}, false, weight, {}, &amax)->launch(source.data(), 64, 0, 1, nullptr) == 98);
  CHECK(make_quantize_with(quantize, &amax, weight)->launch(source.data(), 64, 0, 1, nullptr) == 98);
  failing_status = 0;
}

}  // namespace
}  // namespace weightlift

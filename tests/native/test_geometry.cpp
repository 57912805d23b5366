#include "plan/geometry.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

namespace weightlift {
namespace {

using Random = std::mt19937_64;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// The oracle: the bytes one by one.
using Bytes = std::set<int64_t>;

Bytes bytes_of(int64_t begin, int64_t item_bytes, const std::vector<RegionDim>& dims) {
  Bytes starts{begin};
  for (const RegionDim& dim : dims) {
    Bytes moved;
    for (int64_t start : starts) {
      for (int64_t i = 0; i < dim.size; ++i) moved.insert(start + i * dim.stride);
    }
    starts = std::move(moved);
  }
  Bytes bytes;
  for (int64_t start : starts) {
    for (int64_t i = 0; i < item_bytes; ++i) bytes.insert(start + i);
  }
  return bytes;
}

std::vector<ByteRange> maximal_runs(const Bytes& bytes) {
  std::vector<ByteRange> runs;
  for (int64_t byte : bytes) {
    if (!runs.empty() && runs.back().end == byte) {
      ++runs.back().end;
    } else {
      runs.push_back({byte, byte + 1});
    }
  }
  return runs;
}

bool disjoint(const Bytes& a, const Bytes& b) {
  return std::ranges::none_of(a, [&](int64_t byte) { return b.contains(byte); });
}

struct Box {
  int64_t begin;
  int64_t item_bytes;
  std::vector<RegionDim> dims;

  Region region() const { return Region(begin, item_bytes, dims); }
  Bytes bytes() const { return bytes_of(begin, item_bytes, dims); }
};

// Boxes as views make them (nested, in any order of dimensions), and others: interleaved, overlapping, repeating,
// empty.
Box random_box(Random& random) {
  Box box{uniform(random, 0, 40), int64_t{1} << uniform(random, 0, 2), {}};
  const int64_t rank = uniform(random, 0, 5);
  const bool view = uniform(random, 0, 2) != 0;
  int64_t extent = box.item_bytes;
  for (int64_t d = 0; d < rank; ++d) {
    const int64_t size = uniform(random, 0, 99) == 0 ? 0 : uniform(random, 1, rank > 3 ? 3 : 5);
    const bool repeats = uniform(random, 0, 9) == 0;
    const int64_t gap = uniform(random, 0, 1) * uniform(random, 0, 6);
    const int64_t stride = repeats ? 0 : view ? extent + gap : uniform(random, 1, 24);
    box.dims.push_back({size, stride});
    if (size > 0) extent += (size - 1) * stride;
  }
  std::ranges::shuffle(box.dims, random);
  return box;
}

// A part of a box, or something close to it: what tests for overlap and cover differ in by a byte.
Box relative_of(Box box, Random& random) {
  for (RegionDim& dim : box.dims) {
    if (dim.size == 0) continue;
    const int64_t first = uniform(random, 0, dim.size - 1);
    box.begin += first * dim.stride;
    dim.size = uniform(random, 1, dim.size - first);
    if (uniform(random, 0, 5) == 0) {  // every other one
      dim.stride *= 2;
      dim.size = (dim.size + 1) / 2;
    }
    if (uniform(random, 0, 19) == 0) ++dim.size;
  }
  if (uniform(random, 0, 3) == 0) box.begin += uniform(random, -3, 3);
  if (uniform(random, 0, 9) == 0) box.item_bytes = int64_t{1} << uniform(random, 0, 2);
  return box;
}

TEST_CASE("a region has the bytes of its box") {
  Random random(1);
  for (int i = 0; i < 6000; ++i) {
    const Box box = random_box(random);
    const Region region = box.region();
    const std::vector<ByteRange> expected = maximal_runs(box.bytes());
    REQUIRE(region.runs() == expected);
    REQUIRE(region.empty() == expected.empty());
    REQUIRE(region.contiguous() == (expected.size() <= 1));
    if (!expected.empty()) REQUIRE(region.bounds() == ByteRange{expected.front().begin, expected.back().end});
  }
}

TEST_CASE("overlaps and covers are exact") {
  Random random(2);
  int overlapping = 0;
  int covering = 0;
  const int pairs = 12000;
  for (int i = 0; i < pairs; ++i) {
    const Box a = random_box(random);
    const Box b = i % 4 == 0 ? random_box(random) : relative_of(a, random);
    const Bytes a_bytes = a.bytes();
    const Bytes b_bytes = b.bytes();
    const bool overlap = !disjoint(a_bytes, b_bytes);
    const bool covers = std::ranges::includes(a_bytes, b_bytes);
    REQUIRE(a.region().overlaps(b.region()) == overlap);
    REQUIRE(b.region().overlaps(a.region()) == overlap);
    REQUIRE(a.region().covers(b.region()) == covers);
    REQUIRE(b.region().covers(a.region()) == std::ranges::includes(b_bytes, a_bytes));
    overlapping += overlap;
    covering += covers;
  }
  CHECK(std::min(overlapping, pairs - overlapping) > pairs / 10);  // the loop has seen enough of each answer
  CHECK(std::min(covering, pairs - covering) > pairs / 10);
}

TEST_CASE("regions with more runs than could be walked are compared by their strides") {
  const int64_t rows = int64_t{1} << 40;
  const Region matrix(0, 2, {{rows, 4096}, {2048, 2}});
  const Region left(0, 2, {{rows, 4096}, {1024, 2}});
  const Region right(2048, 2, {{rows, 4096}, {1024, 2}});
  const Region middle(2046, 2, {{rows, 4096}, {2, 2}});
  const Region even_columns(0, 2, {{rows, 4096}, {1024, 4}});
  const Region odd_columns(2, 2, {{rows, 4096}, {1024, 4}});
  CHECK(matrix.contiguous());
  CHECK_FALSE(left.overlaps(right));
  CHECK(left.overlaps(middle));
  CHECK(right.overlaps(middle));
  CHECK_FALSE(left.covers(middle));
  CHECK(left.covers(Region(2046, 2, {{rows, 4096}})));
  CHECK_FALSE(left.covers(Region(2046, 2, {{rows + 1, 4096}})));
  CHECK(matrix.covers(even_columns));
  CHECK_FALSE(even_columns.overlaps(odd_columns));
  CHECK(left.overlaps(odd_columns));
  CHECK_FALSE(left.covers(odd_columns));
}

TEST_CASE("runs can be left early") {
  const Region region(0, 1, {{10, 3}});
  int seen = 0;
  region.visit_runs([&](ByteRange) { return ++seen < 4; });
  CHECK(seen == 4);
}

TEST_CASE("unite and gaps agree with counting") {
  Random random(3);
  for (int i = 0; i < 5000; ++i) {
    std::map<int64_t, int> times;
    std::vector<ByteRange> ranges;
    for (int64_t n = uniform(random, 0, 8); n > 0; --n) {
      const int64_t begin = uniform(random, 0, 60);
      ranges.push_back({begin, begin + uniform(random, 0, 12)});
      for (int64_t byte = begin; byte < ranges.back().end; ++byte) ++times[byte];
    }
    const ByteRange whole{uniform(random, 0, 30), uniform(random, 30, 80)};
    Bytes once;
    Bytes twice;
    Bytes missing;
    for (auto [byte, count] : times) {
      once.insert(byte);
      if (count > 1) twice.insert(byte);
    }
    for (int64_t byte = whole.begin; byte < whole.end; ++byte) {
      if (!once.contains(byte)) missing.insert(byte);
    }
    std::vector<ByteRange> overlapped;
    const std::vector<ByteRange> united = unite(ranges, &overlapped);
    REQUIRE(united == maximal_runs(once));
    REQUIRE(overlapped == maximal_runs(twice));
    REQUIRE(unite(ranges) == united);
    REQUIRE(gaps(whole, united) == maximal_runs(missing));
  }
}

Transfer random_transfer(Random& random) {
  Transfer transfer;
  transfer.src_type = static_cast<ElementType>(uniform(random, 0, 4));
  transfer.dst_type = transfer.src_type;
  transfer.src_offset = uniform(random, 0, 50);
  const bool view = uniform(random, 0, 3) != 0;
  int64_t src_extent = element_bytes(transfer.src_type);
  int64_t dst_extent = element_bytes(transfer.dst_type);
  for (int64_t rank = uniform(random, 0, 5); rank > 0; --rank) {
    const int64_t size = uniform(random, 1, 4);
    const int64_t gap = uniform(random, 0, 1) * uniform(random, 0, 6);
    const bool repeats = uniform(random, 0, 5) == 0;
    const int64_t src_stride = repeats ? 0 : view ? src_extent + gap : uniform(random, 1, 40);
    const int64_t dst_stride = dst_extent + uniform(random, 0, 1) * uniform(random, 0, 6);
    transfer.dims.push_back({size, src_stride, dst_stride});
    src_extent += (size - 1) * src_stride;
    dst_extent += (size - 1) * dst_stride;
  }
  std::ranges::shuffle(transfer.dims, random);
  return transfer;
}

// Where the elements lie, as (source byte, destination byte), counted in the order of the dimensions.
std::vector<std::pair<int64_t, int64_t>> elements_of(const std::vector<Dim>& dims) {
  std::vector<std::pair<int64_t, int64_t>> elements{{0, 0}};
  for (const Dim& dim : dims) {
    std::vector<std::pair<int64_t, int64_t>> inner;
    for (auto [src, dst] : elements) {
      for (int64_t i = 0; i < dim.size; ++i) inner.emplace_back(src + i * dim.src_stride, dst + i * dim.dst_stride);
    }
    elements = std::move(inner);
  }
  return elements;
}

TEST_CASE("the canonical form moves the same elements and walks the file forwards") {
  Random random(4);
  int nested = 0;
  for (int i = 0; i < 5000; ++i) {
    Transfer transfer = random_transfer(random);
    const int64_t item = element_bytes(transfer.src_type);
    auto before = elements_of(transfer.dims);
    canonicalise(transfer.dims);
    auto elements = elements_of(transfer.dims);

    std::vector<Dim> moving = transfer.dims;
    std::erase_if(moving, [](const Dim& dim) { return dim.src_stride == 0; });
    bool forwards = true;
    int64_t next = 0;
    for (auto [src, dst] : elements_of(moving)) {
      forwards = forwards && src >= next;
      next = src + item;
    }
    int64_t end = item;
    for (size_t n = 0; n < elements.size(); ++n) {
      const int64_t src = elements[n].first;
      REQUIRE(source_byte(transfer, static_cast<int64_t>(n)) == src);
      end = std::max(end, src + item);
    }
    REQUIRE(source_bounds(transfer) == ByteRange{transfer.src_offset, transfer.src_offset + end});
    REQUIRE(source_is_nested(transfer) == forwards);
    nested += forwards;
    for (size_t d = 0; d < transfer.dims.size(); ++d) {
      REQUIRE(transfer.dims[d].size > 1);
      if (d == 0) continue;
      const Dim& outer = transfer.dims[d - 1];
      const Dim& inner = transfer.dims[d];
      REQUIRE(outer.src_stride >= inner.src_stride);
      const bool one =
          outer.src_stride == inner.size * inner.src_stride && outer.dst_stride == inner.size * inner.dst_stride;
      REQUIRE_FALSE(one);
    }
    std::ranges::sort(before);
    std::ranges::sort(elements);
    REQUIRE(elements == before);
  }
  CHECK(nested > 2000);
}

TEST_CASE("canonical dimensions of common copies") {
  const auto canonical = [](std::vector<Dim> dims) {
    canonicalise(dims);
    return dims;
  };
  CHECK(canonical({}).empty());
  CHECK(canonical({{1, 7, 9}, {1, 0, 0}}).empty());
  CHECK(canonical({{4, 6, 6}, {3, 2, 2}}) == std::vector<Dim>{{12, 2, 2}});              // contiguous
  CHECK(canonical({{4, 10, 6}, {3, 2, 2}}) == std::vector<Dim>{{4, 10, 6}, {3, 2, 2}});  // columns of a matrix
  CHECK(canonical({{4, 2, 6}, {3, 8, 2}}) == std::vector<Dim>{{3, 8, 2}, {4, 2, 6}});    // transposed
  CHECK(canonical({{4, 0, 6}, {3, 2, 2}}) == std::vector<Dim>{{3, 2, 2}, {4, 0, 6}});    // expanded rows
  CHECK(canonical({{4, 0, 2}, {3, 0, 8}}) == std::vector<Dim>{{12, 0, 2}});              // one number everywhere
}

TEST_CASE("elements ending by a byte are counted exactly") {
  Random random(5);
  for (int i = 0; i < 4000; ++i) {
    Transfer transfer = random_transfer(random);
    const int64_t item = element_bytes(transfer.src_type);
    canonicalise(transfer.dims);
    if (!source_is_nested(transfer)) continue;
    const auto elements = elements_of(transfer.dims);
    const ByteRange bounds = source_bounds(transfer);
    auto element = elements.begin();
    for (int64_t end = std::max<int64_t>(0, bounds.begin - 2); end <= bounds.end + 2; ++end) {
      while (element != elements.end() && transfer.src_offset + element->first + item <= end) ++element;
      REQUIRE(elements_ending_by(transfer, end) == element - elements.begin());
    }
  }
}

TEST_CASE("the destination of a transfer is a region of its element size") {
  std::vector<std::byte> memory(64);
  Transfer transfer;
  transfer.src_type = ElementType::kFloat32;
  transfer.dst_type = ElementType::kBFloat16;
  transfer.dst = memory.data();
  transfer.dims = {{3, 40, 10}, {4, 4, 2}};
  const int64_t begin = reinterpret_cast<int64_t>(memory.data());
  CHECK(Region::destination_of(transfer).runs() ==
        std::vector<ByteRange>{{begin, begin + 8}, {begin + 10, begin + 18}, {begin + 20, begin + 28}});
}

}  // namespace
}  // namespace weightlift

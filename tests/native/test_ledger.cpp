#include "plan/ledger.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "granule_op.h"

namespace weightlift {
namespace {

using Random = std::mt19937_64;
using Ids = std::vector<int64_t>;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

constexpr int64_t kBase = 4096;  // destinations of transfers that are never carried out

// `rows` runs of `bytes` bytes, `pitch` apart, from address kBase + begin on.
Transfer box(int64_t id, int64_t begin, int64_t bytes, int64_t rows = 1, int64_t pitch = 0) {
  return make_transfer(id, 0, ElementType::kBytes1, 0, ElementType::kBytes1,
                       reinterpret_cast<std::byte*>(kBase + begin), {{rows, bytes, pitch}, {bytes, 1, 1}});
}

Region region(int64_t begin, int64_t bytes, int64_t rows = 1, int64_t pitch = 0) {
  return Region(kBase + begin, 1, {{rows, pitch}, {bytes, 1}});
}

Ids ids_of(const Batch& batch) {
  Ids ids;
  for (const Transfer& transfer : batch.transfers) ids.push_back(transfer.id);
  return ids;
}

Ids sorted(Ids ids) {
  std::ranges::sort(ids);
  return ids;
}

std::vector<std::pair<int, Ids>> levels_of(const std::vector<Batch>& batches) {
  std::vector<std::pair<int, Ids>> levels;
  for (const Batch& batch : batches) levels.emplace_back(batch.level, ids_of(batch));
  return levels;
}

}  // namespace

TEST_CASE("disjoint transfers are one batch, overlapping ones ascend in level") {
  Ledger ledger;
  ledger.add(box(0, 0, 10));
  ledger.add(box(1, 10, 10));
  ledger.add(box(2, 5, 10));   // over 0 and 1
  ledger.add(box(3, 14, 10));  // over 1 and 2
  ledger.add(box(4, 40, 10));
  CHECK(ledger.waiting_bytes() == 50);
  const auto batches = ledger.start();
  CHECK(levels_of(batches) == std::vector<std::pair<int, Ids>>{{0, {0, 1, 4}}, {1, {2}}, {2, {3}}});
  CHECK(ledger.waiting_bytes() == 0);
  CHECK(ledger.start().empty());
  CHECK(ledger.has_pending());

  ledger.add(box(5, 0, 2));  // over 0, which has been started and has not landed
  CHECK(ledger.start().at(0).level == 1);
  for (const Batch& batch : batches) ledger.landed(batch.label);
  ledger.add(box(6, 14, 10));
  CHECK(levels_of(ledger.start()) == std::vector<std::pair<int, Ids>>{{0, {6}}});
}

TEST_CASE("column halves of one matrix are disjoint") {
  Ledger ledger;
  ledger.add(box(0, 0, 8, 4, 16));
  ledger.add(box(1, 8, 8, 4, 16));
  CHECK(levels_of(ledger.start()) == std::vector<std::pair<int, Ids>>{{0, {0, 1}}});
}

TEST_CASE("an op writes its output, whatever its source is") {
  const auto op = [](int64_t id, int64_t begin, int64_t bytes, int64_t rows, int64_t pitch) {
    const OpSource source{4 * rows, bytes, 4};
    auto* data = reinterpret_cast<std::byte*>(kBase + begin);
    return make_op_transfer(id, 0, 0, 100 + bytes, std::make_shared<GranuleOp>(source, data, pitch));
  };
  Ledger ledger;
  ledger.track_writes();
  ledger.add(op(0, 0, 8, 4, 16));
  ledger.add(op(1, 8, 8, 4, 16));  // beside it
  CHECK(ledger.waiting_bytes() == 64);
  CHECK(sorted(ledger.needed_for(region(8, 8))) == Ids{1});
  CHECK(sorted(ledger.needed_for(region(7, 2))) == Ids{0, 1});
  CHECK(ledger.coverage({kBase, kBase + 66}).gaps == std::vector<ByteRange>{{kBase + 64, kBase + 66}});
  ledger.add(op(2, 60, 4, 2, 4));
  CHECK(levels_of(ledger.start()) == std::vector<std::pair<int, Ids>>{{0, {0, 1}}, {1, {2}}});
  ledger.add(op(3, 80, 8, 2, 8));
  ledger.add(box(4, 80, 16));
  CHECK(ledger.num_dropped() == 1);
}

TEST_CASE("an op whose rows overlap, or that has not one output, is refused") {
  const auto op = [](int64_t dst_row_stride) {
    return std::make_shared<GranuleOp>(OpSource{4, 8, 1}, reinterpret_cast<std::byte*>(kBase), dst_row_stride);
  };
  CHECK_THROWS_AS(make_op_transfer(0, 0, 0, 7, op(8)), std::invalid_argument);
  CHECK_THROWS_AS(make_op_transfer(0, 0, 0, 8, op(7)), std::invalid_argument);
  CHECK_THROWS_AS(make_op_transfer(0, 0, 0, 8, nullptr), std::invalid_argument);
  CHECK(make_op_transfer(0, 0, 0, 8, op(8)).num_elements() == 32);
}

TEST_CASE("a waiting transfer that is wholly overwritten is dropped") {
  Ledger ledger;
  ledger.add(box(0, 0, 10));
  ledger.add(box(1, 8, 4));
  ledger.add(box(2, 0, 10));  // covers 0, and a part of 1
  CHECK(ledger.num_dropped() == 1);
  CHECK(sorted(ledger.pending_ids()) == Ids{1, 2});
  CHECK(ledger.waiting_bytes() == 14);
  const auto batches = ledger.start();
  CHECK(ids_of(batches.back()) == Ids{2});

  ledger.add(box(3, 0, 20));  // covers both, but they are on their way
  CHECK(ledger.num_dropped() == 1);
  CHECK(sorted(ledger.pending_ids()) == Ids{1, 2, 3});
}

TEST_CASE("two transfers that only together cover an earlier one leave it") {
  Ledger ledger;
  ledger.add(box(0, 0, 10));
  ledger.add(box(1, 0, 5));
  ledger.add(box(2, 5, 5));
  CHECK(ledger.num_dropped() == 0);
  CHECK(levels_of(ledger.start()) == std::vector<std::pair<int, Ids>>{{0, {0}}, {1, {1, 2}}});
}

TEST_CASE("what is needed for a region is closed over earlier overlapping transfers") {
  Ledger ledger;
  ledger.add(box(0, 0, 10));
  ledger.add(box(1, 8, 10));   // over 0
  ledger.add(box(2, 16, 10));  // over 1
  ledger.add(box(3, 22, 10));  // over 2, and later
  ledger.add(box(4, 50, 10));
  CHECK(sorted(ledger.needed_for(region(20, 2))) == Ids{0, 1, 2});
  CHECK(sorted(ledger.needed_for(region(0, 4))) == Ids{0});
  CHECK(sorted(ledger.needed_for(region(0, 4, 2, 24))) == Ids{0, 1, 2, 3});  // meets 0, 2 and 3
  CHECK(ledger.needed_for(region(40, 10)).empty());
  CHECK(ledger.needed_for(region(0, 0)).empty());

  const auto batches = ledger.start(ledger.needed_for(region(20, 2)));
  CHECK(levels_of(batches) == std::vector<std::pair<int, Ids>>{{0, {0}}, {1, {1}}, {2, {2}}});
  CHECK(ledger.waiting_bytes() == 20);
  CHECK(ledger.batches_of({0, 2, 3}) == Ids{batches[0].label, batches[2].label});
  CHECK(sorted(ledger.needed_for(region(20, 2))) == Ids{0, 1, 2});  // started ones have not landed
  for (const Batch& batch : batches) ledger.landed(batch.label);
  CHECK(ledger.needed_for(region(20, 2)).empty());
  CHECK(sorted(ledger.pending_ids()) == Ids{3, 4});
  CHECK(ledger.start({0, 4, 99}).size() == 1);  // what has landed, and what never was, is not started
}

TEST_CASE("an overwrite needs the transfers that also write elsewhere, and drops the others") {
  Ledger ledger;
  ledger.add(box(0, 0, 4));
  ledger.add(box(1, 6, 10));
  ledger.add(box(2, 8, 2));
  CHECK(sorted(ledger.needed_for(region(0, 12), /*overwrites=*/true)) == Ids{1});
  ledger.drop_inside(region(0, 12));
  CHECK(ledger.pending_ids() == Ids{1});
  CHECK(ledger.num_dropped() == 2);
  CHECK(ledger.waiting_bytes() == 10);
}

TEST_CASE("drop_inside leaves what has been started") {
  Ledger ledger;
  ledger.add(box(0, 0, 4));
  ledger.start();
  ledger.add(box(1, 4, 4));
  ledger.drop_inside(region(0, 8));
  CHECK(ledger.pending_ids() == Ids{0});
  CHECK(ledger.needed_for(region(0, 8), /*overwrites=*/true) == Ids{0});
}

TEST_CASE("coverage names gaps and doubles") {
  Ledger ledger;
  ledger.track_writes();
  ledger.add(box(0, 0, 8, 4, 16));   // left half of a 4 x 16 matrix
  ledger.add(box(1, 12, 4, 4, 16));  // the last quarter of each row
  auto coverage = ledger.coverage({kBase, kBase + 64});
  CHECK(coverage.doubles.empty());
  CHECK(coverage.gaps ==
        std::vector<ByteRange>{
            {kBase + 8, kBase + 12}, {kBase + 24, kBase + 28}, {kBase + 40, kBase + 44}, {kBase + 56, kBase + 60}});
  ledger.add_write(region(8, 4, 4, 16));
  ledger.add_write(region(0, 8));  // a fill under a transfer is no double
  ledger.add_write(region(0, 0));
  coverage = ledger.coverage({kBase, kBase + 64});
  CHECK(coverage.gaps.empty());
  CHECK(coverage.doubles.empty());

  ledger.add(box(2, 30, 4));
  for (const Batch& batch : ledger.start()) ledger.landed(batch.label);  // landing takes nothing back
  coverage = ledger.coverage({kBase - 4, kBase + 66});
  CHECK(coverage.gaps == std::vector<ByteRange>{{kBase - 4, kBase}, {kBase + 64, kBase + 66}});
  CHECK(coverage.doubles == std::vector<ByteRange>{{kBase + 30, kBase + 34}});
}

TEST_CASE("a strided transfer that lies inside a covered strided one is dropped, one beside it is not") {
  Ledger ledger;
  ledger.add(box(0, 1, 4, 3, 16));
  ledger.add(box(1, 8, 4, 3, 16));
  ledger.add(box(2, 0, 8, 4, 16));
  CHECK(ledger.num_dropped() == 1);
  CHECK(levels_of(ledger.start()) == std::vector<std::pair<int, Ids>>{{0, {1, 2}}});
}

namespace {

// Runs random programs on a small memory in two ways: each copy at once, and through a Ledger as its callers do.
class Program {
 public:
  explicit Program(uint64_t seed) : random_(seed) {
    for (auto& byte : file_) byte = static_cast<std::byte>(random_());
    lazy_ = eager_ = std::vector<std::byte>(kMemory);
  }

  void step() {
    switch (uniform(random_, 0, 11)) {
      case 0:
        return look(random_region());
      case 1:
        return overwrite(random_region());
      case 2:
        return start_all();
      case 3:
        return land_one();
      default:
        return record();
    }
  }

  void finish() {
    start_all();
    while (!queue_.empty() || !active_.empty()) land_one();
    CHECK(!ledger_.has_pending());
    CHECK(ledger_.waiting_bytes() == 0);
    CHECK(lazy_ == eager_);
  }

 private:
  static constexpr int64_t kMemory = 96;
  static constexpr int64_t kFile = 256;

  int64_t address(int64_t offset) const { return reinterpret_cast<int64_t>(lazy_.data()) + offset; }

  static std::set<int64_t> bytes_of(const Region& region) {
    std::set<int64_t> bytes;
    for (ByteRange run : region.runs()) {
      for (int64_t byte = run.begin; byte < run.end; ++byte) bytes.insert(byte);
    }
    return bytes;
  }
  static bool meet(const std::set<int64_t>& a, const std::set<int64_t>& b) {
    return std::ranges::any_of(a, [&](int64_t byte) { return b.contains(byte); });
  }

  struct Box {
    int64_t begin;
    int64_t item;
    std::vector<RegionDim> dims;  // from the inside, not overlapping
  };
  Box random_box() {
    for (;;) {
      Box box{0, int64_t{1} << uniform(random_, 0, 2), {}};
      int64_t extent = box.item;
      for (int64_t d = uniform(random_, 0, 2); d > 0; --d) {
        const int64_t stride = extent + uniform(random_, 0, 1) * uniform(random_, 1, 8);
        box.dims.push_back({uniform(random_, 1, 6), stride});
        extent += (box.dims.back().size - 1) * stride;
      }
      if (extent > kMemory) continue;
      box.begin = uniform(random_, 0, kMemory - extent);
      return box;
    }
  }
  Region random_region() {
    const Box box = random_box();
    return Region(address(box.begin), box.item, box.dims);
  }

  void record() {
    Box box = random_box();
    std::ranges::shuffle(box.dims, random_);  // transposed, too
    std::vector<Dim> dims;
    int64_t extent = box.item;
    for (const RegionDim& dim : box.dims) {
      dims.push_back({dim.size, extent, dim.stride});
      extent *= dim.size;
    }
    const ElementType type = box.item == 1   ? ElementType::kBytes1
                             : box.item == 2 ? ElementType::kBytes2
                                             : ElementType::kBytes4;
    const Transfer transfer = make_transfer(next_id_++, 0, type, uniform(random_, 0, kFile - extent), type,
                                            lazy_.data() + box.begin, std::move(dims));
    carry_out(transfer, eager_);
    recorded_.emplace(transfer.id, bytes_of(Region::destination_of(transfer)));
    ledger_.add(transfer);
  }

  // By a loop over elements, into one of the two memories.
  void carry_out(const Transfer& transfer, std::vector<std::byte>& memory) const {
    const int64_t item = element_bytes(transfer.src_type);
    for (int64_t i = 0; i < transfer.num_elements(); ++i) {
      int64_t src = transfer.src_offset;
      int64_t dst = transfer.dst - lazy_.data();
      int64_t rest = i;
      for (const Dim& dim : transfer.dims) {
        src += rest % dim.size * dim.src_stride;
        dst += rest % dim.size * dim.dst_stride;
        rest /= dim.size;
      }
      std::memcpy(memory.data() + dst, file_ + src, static_cast<size_t>(item));
    }
  }

  // The definition, byte by byte: those that the region meets, and what came before them and shares a byte.
  std::set<int64_t> expect_needed(const Region& region) {
    const std::set<int64_t> looked_at = bytes_of(region);
    Ids pending = sorted(ledger_.pending_ids());
    std::set<int64_t> needed;
    for (auto id = pending.rbegin(); id != pending.rend(); ++id) {
      const bool wanted = meet(recorded_.at(*id), looked_at) || std::ranges::any_of(needed, [&](int64_t later) {
                            return meet(recorded_.at(*id), recorded_.at(later));
                          });
      if (wanted) needed.insert(*id);
    }
    return needed;
  }

  void run_now(const Ids& ids) {
    const Ids labels = ledger_.batches_of(ids);
    const auto on_the_way = [&] {
      const auto among = [&](const Batch& batch) { return std::ranges::count(labels, batch.label) > 0; };
      return std::ranges::any_of(queue_, among) || std::ranges::any_of(active_, among);
    };
    while (on_the_way()) land_one();
    for (const Batch& batch : ledger_.start(ids)) land(batch);
  }

  void look(const Region& region) {
    const Ids needed = ledger_.needed_for(region);
    const std::set<int64_t> expected = expect_needed(region);
    CHECK(sorted(needed) == Ids(expected.begin(), expected.end()));
    run_now(needed);
    check_equal(region);
  }

  void overwrite(const Region& region) {
    run_now(ledger_.needed_for(region, /*overwrites=*/true));
    const auto value = static_cast<std::byte>(random_());
    for (int64_t byte : bytes_of(region)) lazy_[byte - address(0)] = eager_[byte - address(0)] = value;
    ledger_.drop_inside(region);
    CHECK(ledger_.needed_for(region).empty());
    check_equal(region);
  }

  void check_equal(const Region& region) {
    bool equal = true;
    for (int64_t byte : bytes_of(region)) equal &= lazy_[byte - address(0)] == eager_[byte - address(0)];
    CHECK(equal);
  }

  void start_all() {
    for (Batch& batch : ledger_.start()) queue_.push_back(std::move(batch));
  }

  // As a Pipeline does: a batch of a level above 0 waits for all before it, the others may land in any order.
  void land_one() {
    while (!queue_.empty() && !(queue_.front().level > 0 && !active_.empty())) {
      active_.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    if (active_.empty()) return;
    std::swap(active_[static_cast<size_t>(uniform(random_, 0, static_cast<int64_t>(active_.size()) - 1))],
              active_.back());
    land(active_.back());
    active_.pop_back();
  }

  void land(Batch batch) {
    std::set<int64_t> written;
    size_t num_bytes = 0;
    std::ranges::shuffle(batch.transfers, random_);
    for (const Transfer& transfer : batch.transfers) {
      carry_out(transfer, lazy_);
      written.insert(recorded_.at(transfer.id).begin(), recorded_.at(transfer.id).end());
      num_bytes += recorded_.at(transfer.id).size();
    }
    CHECK(written.size() == num_bytes);  // disjoint
    ledger_.landed(batch.label);
  }

  Random random_;
  std::byte file_[kFile];
  std::vector<std::byte> lazy_;
  std::vector<std::byte> eager_;
  Ledger ledger_;
  int64_t next_id_ = 0;
  std::map<int64_t, std::set<int64_t>> recorded_;
  std::deque<Batch> queue_;
  std::vector<Batch> active_;
};

}  // namespace

TEST_CASE("random programs give what copies at once, in program order, would have given") {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    CAPTURE(seed);
    Program program(seed);
    const uint64_t steps = 5 + seed % 60;
    for (uint64_t i = 0; i < steps; ++i) program.step();
    program.finish();
  }
}

TEST_CASE("an interval index finds exactly the ranges that share a byte") {
  Random random(7);
  IntervalIndex index;
  std::map<int64_t, ByteRange> ranges;
  for (int64_t value = 0; value < 4000; ++value) {
    const int64_t begin = uniform(random, 0, 5000);
    const ByteRange range{begin, begin + (int64_t{1} << uniform(random, 0, 12)) + uniform(random, 0, 3)};
    index.insert(range, value);
    ranges.emplace(value, range);
    if (uniform(random, 0, 2) == 0) {
      const auto victim = ranges.lower_bound(uniform(random, 0, value));
      if (victim != ranges.end()) {
        index.erase(victim->second, victim->first);
        ranges.erase(victim);
      }
    }
    if (value % 20 != 0) continue;
    const int64_t from = uniform(random, 0, 9000);
    const ByteRange asked{from, from + uniform(random, 1, 300)};
    std::set<int64_t> found;
    index.visit_overlapping(asked, [&](int64_t hit) { CHECK(found.insert(hit).second); });
    std::set<int64_t> expected;
    for (const auto& [other, at] : ranges) {
      if (at.begin < asked.end && asked.begin < at.end) expected.insert(other);
    }
    CHECK(found == expected);
  }
  for (const auto& [value, range] : ranges) index.erase(range, value);
  CHECK(index.empty());
}

}  // namespace weightlift

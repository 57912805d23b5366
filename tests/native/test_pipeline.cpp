#include "staging/pipeline.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "pipeline_rig.h"
#include "readers/make_reader.h"
#include "readers/pread_reader.h"
#include "readers/probe.h"
#include "readers/uring_reader.h"
#include "staging/plan_files.h"
#include "transform/copy.h"
#include "util/unique_fd.h"

namespace weightlift {
namespace {

void check_stats(const Pipeline& pipeline) {
  const PipelineStats stats = pipeline.stats();
  int64_t bytes = 0;
  for (const FileStats& file : stats.files) bytes += file.direct_bytes + file.buffered_bytes;
  CHECK(stats.bytes_read == bytes);
  CHECK(stats.in_place_bytes <= stats.bytes_read);
}

int count_entries(const char* folder) {
  return static_cast<int>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}
int count_threads() { return count_entries("/proc/self/task"); }
int count_fds() { return count_entries("/proc/self/fd"); }

bool becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 500; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

bool can_direct() {
  static const bool can = [] {
    const bool usable = TestFile(kMiB).can_direct();
    if (!usable) MESSAGE("skipped, no direct I/O on files in ", fs::temp_directory_path().string());
    return usable;
  }();
  return can;
}

}  // namespace

TEST_CASE("everything lands, however badly the reader behaves") {
  const TestFile one(3 * kMiB + 17, 1);
  const TestFile two(200 * kKiB + 3, 2);
  struct Case {
    const char* name;
    FaultPlan plan;
  };
  const auto plan = [](auto change) {
    FaultPlan plan;
    change(plan);
    return plan;
  };
  const std::vector<Case> cases = {
      {"nothing wrong", {}},
      {"short by blocks of 4096", plan([](FaultPlan& p) { p.short_chance = 0.7, p.short_block = 4096; })},
      {"short by blocks of 512", plan([](FaultPlan& p) { p.short_chance = 0.7, p.short_block = 512; })},
      {"short anywhere", plan([](FaultPlan& p) { p.short_chance = 0.7; })},
      {"interrupted", plan([](FaultPlan& p) { p.interrupt_chance = 0.6; })},
      {"late and out of order", plan([](FaultPlan& p) { p.out_of_order = true, p.max_delay = 20; })},
      {"all of it", plan([](FaultPlan& p) {
         p.short_chance = 0.5, p.interrupt_chance = 0.5, p.out_of_order = true, p.max_delay = 5;
       })},
  };
  for (const Strategy strategy : {Strategy::kBuffered, Strategy::kDirect, Strategy::kAuto}) {
    if (strategy == Strategy::kDirect && !can_direct()) continue;
    CAPTURE(static_cast<int>(strategy));
    for (const Case& c : cases) {
      CAPTURE(c.name);
      for (uint64_t seed = 0; seed < 4; ++seed) {
        CAPTURE(seed);
        Load load(seed, {&one, &two});
        FaultPlan faults = c.plan;
        faults.seed = 100 * seed;
        Rig rig = make_rig(strategy, faults, static_cast<int>(1 + 5 * seed));
        Pipeline pipeline(rig.options);
        load.add_files(pipeline);
        CHECK(load.run(pipeline));
        check_stats(pipeline);
        CHECK(rig.control->submitted == rig.control->completed);
      }
    }
  }
}

TEST_CASE("single bytes at a time are put together") {
  const TestFile file(5000);
  std::vector<std::byte> memory(4000);
  FaultPlan plan;
  plan.short_chance = 1;  // down to one byte
  Rig rig = make_rig(Strategy::kBuffered, plan);
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 900, 4000, memory.data())}, Order::kAppend), kLong));
  CHECK(std::memcmp(memory.data(), file.bytes() + 900, 4000) == 0);
  CHECK(rig.control->submitted > 3);
  const PipelineStats stats = pipeline.stats();
  CHECK(stats.num_reads == 1);
  CHECK(stats.bytes_read == 4000);
  CHECK(stats.bytes_needed == 4000);
  CHECK(stats.num_transfers == 1);
  CHECK(pipeline.bytes_landed() == 4000);
}

TEST_CASE("a granule larger than a chunk takes several buffers, one larger than all of them memory of its own") {
  const TestFile file(6 * kMiB);
  std::vector<std::byte> memory(64 * kKiB);
  std::vector<std::byte> expected(memory.size());
  std::vector<Transfer> transfers;
  int64_t used = 0;
  for (const int64_t num_rows : {3, 5, 12, 12, 3}) {  // rows of 64 KiB, as chunks are; 8 of them are all of staging
    constexpr int64_t kRowBytes = 1000;
    auto op = std::make_shared<GranuleOp>(OpSource{num_rows, kRowBytes, num_rows}, memory.data() + used, kRowBytes);
    transfers.push_back(make_op_transfer(used, 0, used, kChunk, std::move(op)));
    copy_naively(transfers.back(), file.bytes(), expected.data() + used);
    used += kRowBytes;
  }
  for (const int64_t merge_gap_bytes : {int64_t{0}, kMiB}) {  // row by row, and with what lies between
    CAPTURE(merge_gap_bytes);
    std::ranges::fill(memory, std::byte{0});
    FaultPlan plan;
    plan.short_chance = 0.5;
    plan.out_of_order = true;
    plan.max_delay = 3;
    Rig rig = make_rig(Strategy::kBuffered, plan);
    rig.options.merge_gap_bytes = merge_gap_bytes;
    rig.options.num_workers = 3;
    Pipeline pipeline(rig.options);
    pipeline.add_file(file.path(), file.identity());
    CHECK(pipeline.wait(pipeline.submit(transfers, Order::kAppend), kLong));
    CHECK(!pipeline.fault());
    CHECK(memory == expected);
    const PipelineStats stats = pipeline.stats();
    CHECK(stats.num_whole_ops == (merge_gap_bytes == 0 ? 0 : 5));
    CHECK(stats.whole_op_bytes == (merge_gap_bytes == 0 ? 0 : 11 * kChunk + 4 * kKiB));
  }
}

TEST_CASE("a failing read inside of a large granule names its transfer") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  FaultPlan plan;
  plan.fail_offset = 5 * kChunk + 100;
  for (const int64_t merge_gap_bytes : {int64_t{0}, kMiB}) {
    Rig rig = make_rig(Strategy::kBuffered, plan);
    rig.options.merge_gap_bytes = merge_gap_bytes;
    Pipeline pipeline(rig.options);
    pipeline.add_file(file.path(), file.identity());
    const OpSource source{10, 1000, 10};
    auto op = std::make_shared<GranuleOp>(source, memory.data(), 1000);
    std::vector<std::byte> head(10);
    CHECK(pipeline.wait(
        pipeline.submit({contiguous(6, 0, 3, 10, head.data()), make_op_transfer(7, 0, 0, kChunk, op)}, Order::kAppend),
        kLong));
    const Fault fault = pipeline.fault();
    CHECK(fault.kind == FaultKind::kRead);
    CHECK(fault.file == 0);
    CHECK(fault.transfer_id == 7);
  }
}

TEST_CASE("a storm of EINTR and EAGAIN passes") {
  const TestFile file(500 * kKiB);
  FaultPlan plan;
  plan.interrupt_chance = 0.95;
  Load load(3, {&file}, 20);
  Pipeline pipeline(make_rig(Strategy::kBuffered, plan).options);
  load.add_files(pipeline);
  CHECK(load.run(pipeline));
}

TEST_CASE("every reader and strategy of this machine gives the same bytes") {
  const TestFile one(20 * kMiB + 17, 1);
  const TestFile two(200 * kKiB + 3, 2);
  std::string refusal;
  const bool has_uring = make_uring_reader({1}, &refusal) != nullptr;
  if (!has_uring) MESSAGE("no io_uring here: ", refusal);
  for (const Strategy strategy : {Strategy::kBuffered, Strategy::kDirect, Strategy::kAuto}) {
    if (strategy == Strategy::kDirect && !can_direct()) continue;
    for (const Backend backend : {Backend::kAuto, Backend::kPread, Backend::kUring}) {
      if (backend == Backend::kUring && !has_uring) continue;
      CAPTURE(static_cast<int>(strategy));
      CAPTURE(static_cast<int>(backend));
      // Half of the file is in the page cache, so that both lanes run where the choice is automatic.
      REQUIRE(::posix_fadvise(one.fd(), 8 * kMiB, 0, POSIX_FADV_DONTNEED) == 0);
      Load load(5, {&one, &two}, 100);
      Pipeline pipeline(real_options(strategy, backend));
      load.add_files(pipeline);
      CHECK(load.run(pipeline));
      check_stats(pipeline);
      const PipelineStats stats = pipeline.stats();
      if (strategy == Strategy::kBuffered) CHECK(stats.files[0].direct_bytes == 0);
      if (strategy == Strategy::kBuffered) CHECK(stats.readers[1].empty());
      if (strategy == Strategy::kDirect) CHECK(stats.files[0].direct_bytes > 0);
      if (strategy == Strategy::kDirect) CHECK(pipeline.direct_io(0).usable);
      if (backend == Backend::kPread) CHECK(stats.readers[strategy == Strategy::kDirect] == "pread");
      if (backend == Backend::kUring) CHECK(stats.readers[strategy == Strategy::kDirect] == "io_uring");
    }
  }
}

TEST_CASE("a planner counts what the pipeline reads, and opens files only while it plans") {
  const TestFile one(20 * kMiB + 17, 1);
  const TestFile two(200 * kKiB + 3, 2);
  for (const Strategy strategy : {Strategy::kBuffered, Strategy::kDirect}) {
    if (strategy == Strategy::kDirect && !can_direct()) continue;
    CAPTURE(static_cast<int>(strategy));
    const PipelineOptions options = real_options(strategy, Backend::kAuto);
    ReadPlanner planner({strategy, options.chunk_bytes, options.merge_gap_bytes, options.advise_hugepages});
    Load load(5, {&one, &two}, 15);  // one segment
    for (const TestFile* file : {&one, &two}) planner.add_file(file->path(), file->identity());
    const int fds_before = count_fds();
    Plan plan;
    CHECK(!planner.plan(load.transfers(), &plan));
    CHECK(count_fds() == fds_before);

    Pipeline pipeline(options);
    load.add_files(pipeline);
    CHECK(load.run(pipeline));
    const PipelineStats read = pipeline.stats();
    const ReadStats& planned = planner.stats();
    CHECK(planned.num_transfers == read.num_transfers);
    CHECK(planned.bytes_needed == read.bytes_needed);
    CHECK(planned.in_place_bytes == read.in_place_bytes);
    int64_t num_reads = 0;
    int64_t bytes = 0;
    for (const ReadStats::Sizes& sizes : {planned.direct_sizes, planned.buffered_sizes, planned.cached_sizes}) {
      for (const ReadStats::Size& size : sizes) {
        num_reads += size.num_reads;
        bytes += size.bytes;
      }
    }
    CHECK(num_reads == read.num_reads);
    CHECK(bytes == read.bytes_read);
    for (size_t file : {0, 1}) {
      CHECK(planned.files[file].direct_bytes == read.files[file].direct_bytes);
      CHECK(planned.files[file].buffered_bytes == read.files[file].buffered_bytes);
    }
  }
}

TEST_CASE("a planner says which file it can't open") {
  const TestFile file(kMiB);
  ReadPlanner planner({Strategy::kBuffered, kChunk, 0, false});
  planner.add_file(file.path(), file.identity());
  planner.add_file(file.path() + "-missing", file.identity());
  std::vector<std::byte> memory(64);
  Plan plan;
  const Fault fault =
      planner.plan({contiguous(3, 0, 0, 32, memory.data()), contiguous(4, 1, 0, 32, memory.data() + 32)}, &plan);
  CHECK(fault.kind == FaultKind::kOpen);
  CHECK(fault.error == ENOENT);
  CHECK(fault.file == 1);
  CHECK(fault.transfer_id == 4);
  CHECK(planner.stats().num_transfers == 0);
}

TEST_CASE("a failing read names file, offset and transfer") {
  const TestFile other(kMiB, 9);
  const TestFile file(kMiB);
  std::vector<std::byte> memory(kMiB);
  FaultPlan plan;
  plan.error = EIO;
  plan.fail_offset = 700'000;
  plan.out_of_order = true;
  Pipeline pipeline(make_rig(Strategy::kBuffered, plan).options);
  pipeline.add_file(other.path(), other.identity());
  const int32_t index = pipeline.add_file(file.path(), file.identity());
  const int64_t first = pipeline.submit(
      {staged(70, index, 0, 40'000, memory.data()), staged(71, index, 500'000, 40'000, memory.data() + 200'000)},
      Order::kAppend);
  const int64_t second = pipeline.submit({contiguous(72, 0, 0, 1000, memory.data() + 900'000)}, Order::kBarrier);
  CHECK(pipeline.wait(first, kLong));
  const Fault fault = pipeline.fault();
  CHECK(fault.kind == FaultKind::kRead);
  CHECK(fault.error == EIO);
  CHECK(fault.file == index);
  CHECK(fault.transfer_id == 71);
  CHECK(fault.offset <= plan.fail_offset);
  CHECK(fault.offset > plan.fail_offset - kChunk);

  // All others fail with it, before and after.
  CHECK(pipeline.wait(second, kLong));
  CHECK(pipeline.wait(pipeline.submit({contiguous(73, 0, 0, 10, memory.data())}, Order::kAppend), kLong));
  CHECK(pipeline.take_landed().empty());
  pipeline.cancel();
  CHECK(pipeline.fault().kind == FaultKind::kRead);  // the first one wins
}

TEST_CASE("an end of file inside a tensor is told with its offset and the tensor that it cuts") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(kMiB);
  for (const Strategy strategy : {Strategy::kBuffered, Strategy::kDirect}) {
    if (strategy == Strategy::kDirect && !can_direct()) continue;
    for (const int64_t end : {300'000, 294'912, 290'000}) {  // the second is a whole number of blocks
      CAPTURE(end);
      FaultPlan plan;
      plan.end_of_file = end;
      Pipeline pipeline(make_rig(strategy, plan).options);
      pipeline.add_file(file.path(), file.identity());
      std::vector<Transfer> transfers;
      for (int64_t id = 0; id < 40; ++id) {  // small: many to one read
        transfers.push_back(contiguous(id, 0, id * 10'000, 10'000, memory.data() + id * 10'000));
      }
      const int64_t segment = pipeline.submit(std::move(transfers), Order::kAppend);
      CHECK(pipeline.wait(segment, kLong));
      // Later reads find the end of the file, too; theirs begin behind it.
      const Fault fault = pipeline.fault();
      CHECK(fault.kind == FaultKind::kEndOfFile);
      CHECK(fault.file == 0);
      CHECK(fault.offset >= end);
      CHECK(fault.transfer_id == fault.offset / 10'000);
    }
  }
}

TEST_CASE("a file that is truncated under a running load is an end of file") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(kMiB);
  Rig rig = make_rig(Strategy::kBuffered, {}, 1);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({staged(4, 0, 0, 100'000, memory.data())}, Order::kAppend);
  REQUIRE(::ftruncate(file.fd(), 200'001) == 0);
  rig.control->permits = INT64_MAX;
  CHECK(pipeline.wait(segment, kLong));
  CHECK(pipeline.fault().kind == FaultKind::kEndOfFile);
  CHECK(pipeline.fault().offset == 200'001);
  CHECK(pipeline.fault().transfer_id == 4);
}

TEST_CASE("a file that has become another one is not read") {
  TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  const FileIdentity before = file.identity();
  Rig rig = make_rig(Strategy::kAuto);
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), before);
  SUBCASE("truncated") { REQUIRE(::ftruncate(file.fd(), kMiB - 1) == 0); }
  SUBCASE("replaced by one of the same size") {
    const TestFile other(kMiB, 2);
    REQUIRE(::rename(other.path().c_str(), file.path().c_str()) == 0);
  }
  SUBCASE("written again") {
    std::this_thread::sleep_for(20ms);
    REQUIRE(::pwrite(file.fd(), "x", 1, 0) == 1);
  }
  const int64_t segment = pipeline.submit({contiguous(6, 0, 0, 1000, memory.data())}, Order::kAppend);
  CHECK(pipeline.wait(segment, kLong));
  CHECK(pipeline.fault().kind == FaultKind::kChanged);
  CHECK(pipeline.fault().file == 0);
  CHECK(pipeline.fault().transfer_id == 6);
  CHECK_FALSE(pipeline.fault().detail.empty());
  CHECK(rig.control->submitted == 0);
}

TEST_CASE("a read that fails since its file is another one says so, with its error") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  FaultPlan plan;
  plan.fail_read = 0;
  plan.error = ESTALE;
  Rig rig = make_rig(Strategy::kBuffered, plan);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({contiguous(3, 0, 0, 1000, memory.data())}, Order::kAppend);
  rig.control->settle();
  FaultKind expected = FaultKind::kChanged;
  std::string detail;
  SUBCASE("replaced") {
    const TestFile other(kMiB, 2);
    REQUIRE(::rename(other.path().c_str(), file.path().c_str()) == 0);
    detail = "another file has taken its place";
  }
  SUBCASE("removed") {
    REQUIRE(::unlink(file.path().c_str()) == 0);
    detail = "it is gone";
  }
  SUBCASE("unchanged") { expected = FaultKind::kRead; }
  rig.control->permits = INT64_MAX;
  CHECK(pipeline.wait(segment, kLong));
  CHECK(pipeline.fault().kind == expected);
  CHECK(pipeline.fault().detail == detail);
  CHECK(pipeline.fault().error == ESTALE);
  CHECK(pipeline.fault().offset == 0);
  CHECK(pipeline.fault().transfer_id == 3);
}

TEST_CASE("a file that is missing fails its segment, and all the others") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(2000);
  Rig rig = make_rig(Strategy::kAuto);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  pipeline.add_file(file.path() + ".gone", file.identity());
  const int64_t running = pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend);
  CHECK_FALSE(pipeline.wait(running, 10ms));
  const int64_t missing = pipeline.submit(
      {contiguous(1, 0, 0, 1000, memory.data() + 1000), contiguous(2, 1, 0, 1000, memory.data() + 1000)},
      Order::kAppend);
  CHECK(missing > running);
  CHECK(pipeline.wait(missing, kLong));
  CHECK(pipeline.wait(running, kLong));
  const Fault fault = pipeline.fault();
  CHECK(fault.kind == FaultKind::kOpen);
  CHECK(fault.error == ENOENT);
  CHECK(fault.file == 1);
  CHECK(fault.transfer_id == 2);
  rig.control->permits = INT64_MAX;
}

// Takes direct reads for impossible, as some file systems do for some of their files.
class RefusesDirect final : public Reader {
 public:
  explicit RefusesDirect(std::shared_ptr<std::atomic<int>> refusals) : refusals_(std::move(refusals)) {}
  std::string_view name() const override { return "test"; }
  int queue_depth() const override { return reader_->queue_depth(); }

  int submit(std::span<const ReadRequest> requests) override {
    for (const ReadRequest& request : requests) {
      if (::fcntl(request.fd, F_GETFL) & O_DIRECT) {
        refused_.push_back({request.token, -EINVAL});
        ++*refusals_;
      } else {
        reader_->submit({&request, 1});
      }
    }
    return 0;
  }

  int wait(std::span<ReadCompletion> out, std::chrono::milliseconds timeout) override {
    if (refused_.empty()) return reader_->wait(out, timeout);
    out[0] = refused_.back();
    refused_.pop_back();
    return 1;
  }

 private:
  std::unique_ptr<Reader> reader_ = make_pread_reader({2, 2});
  std::vector<ReadCompletion> refused_;
  std::shared_ptr<std::atomic<int>> refusals_;
};

TEST_CASE("a file that refuses direct reads is read through the page cache, unless direct was demanded") {
  const TestFile file(kMiB);
  const UniqueFd fd(::open(file.path().c_str(), O_RDONLY | O_CLOEXEC));
  ::fdatasync(fd.get());
  ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  const auto refusals = std::make_shared<std::atomic<int>>(0);
  const auto run = [&](Strategy strategy, std::vector<std::byte>& memory) {
    PipelineOptions options = make_rig(strategy).options;
    options.make_reader = [&](bool, std::string*) { return std::make_unique<RefusesDirect>(refusals); };
    Pipeline pipeline(options);
    pipeline.add_file(file.path(), file.identity());
    const int64_t segment = pipeline.submit({contiguous(7, 0, 100, 500'000, memory.data())}, Order::kAppend);
    CHECK(pipeline.wait(segment, kLong));
    return std::pair(pipeline.fault(), pipeline.stats());
  };
  std::vector<std::byte> memory(500'000);
  const auto [none, stats] = run(Strategy::kAuto, memory);
  CHECK(none.kind == FaultKind::kNone);
  CHECK(stats.fallbacks.size() == (*refusals > 0 ? 1 : 0));  // none where the cache can't be dropped
  std::vector<std::byte> expected(500'000);
  CHECK(::pread(fd.get(), expected.data(), expected.size(), 100) == 500'000);
  CHECK(memory == expected);
  if (!probe_direct(file.path().c_str()).usable) return;
  const auto [fault, unused] = run(Strategy::kDirect, memory);
  CHECK(fault.kind == FaultKind::kRead);
  CHECK(fault.error == EINVAL);
}

TEST_CASE("a reader that can't submit or wait ends the load") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(kMiB);
  FaultPlan plan;
  plan.error = ENOMEM;
  SUBCASE("first submit") { plan.fail_submit = 0; }
  SUBCASE("third submit") { plan.fail_submit = 2; }
  SUBCASE("first wait") { plan.fail_wait = 0; }
  SUBCASE("third wait") { plan.fail_wait = 2; }
  Pipeline pipeline(make_rig(Strategy::kBuffered, plan, 2).options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({staged(0, 0, 0, 130'000, memory.data())}, Order::kAppend);
  CHECK(pipeline.wait(segment, kLong));
  CHECK(pipeline.fault().kind == FaultKind::kRead);
  CHECK(pipeline.fault().error == ENOMEM);
}

TEST_CASE("a lane without a reader is unavailable, with the reason") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  PipelineOptions options = make_rig(Strategy::kBuffered).options;
  options.make_reader = [](bool, std::string*) -> std::unique_ptr<Reader> {
    throw std::runtime_error("none to be had");
  };
  Pipeline pipeline(options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(pipeline.fault().kind == FaultKind::kUnavailable);
  CHECK(pipeline.fault().detail == "none to be had");
}

TEST_CASE("direct reads that were demanded and can't be had are unavailable, with the reason") {
  if (!fs::exists("/dev/shm")) return;
  const TestFile file(kMiB, 1, "/dev/shm");
  const DirectIo direct_io = probe_direct(file.path().c_str());
  std::vector<std::byte> memory(1000);
  Pipeline pipeline(make_rig(Strategy::kDirect).options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(static_cast<bool>(pipeline.fault()) == !direct_io.usable);
  CHECK(pipeline.direct_io(0).usable == direct_io.usable);
  if (!direct_io.usable) {
    CHECK(pipeline.fault().kind == FaultKind::kUnavailable);
    CHECK(pipeline.fault().detail == direct_io.reason);
    CHECK(pipeline.direct_io(0).reason == direct_io.reason);
  }
}

TEST_CASE("the way of reading that was fallen back to is told") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  Rig rig = make_rig(Strategy::kBuffered);
  rig.options.make_reader = [make = rig.options.make_reader](bool direct, std::string* fallback) {
    *fallback = "slower";
    return make(direct, fallback);
  };
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(pipeline.stats().fallbacks == std::vector<std::string>{"slower"});
  CHECK(pipeline.stats().readers == std::array<std::string, 2>{"faulty", ""});
}

TEST_CASE("no more is read ahead than staging memory holds") {
  const TestFile file(4 * kMiB);
  std::vector<std::byte> memory(2 * kMiB);
  for (const int64_t buffers : {1, 2, 5}) {
    CAPTURE(buffers);
    Rig rig = make_rig(Strategy::kBuffered, {}, 3);
    rig.options.staging_bytes = buffers * kChunk;
    rig.control->permits = 0;
    Pipeline pipeline(rig.options);
    pipeline.add_file(file.path(), file.identity());
    const int64_t segment = pipeline.submit({staged(0, 0, 0, 500'000, memory.data())}, Order::kAppend);
    rig.control->settle();
    CHECK(rig.control->submitted == std::min<int64_t>(buffers, 3));
    rig.control->permits = INT64_MAX;
    CHECK(pipeline.wait(segment, kLong));
    CHECK(rig.control->max_in_flight == std::min<int64_t>(buffers, 3));
    std::vector<std::byte> expected(2 * kMiB);
    copy_naively(staged(0, 0, 0, 500'000, nullptr), file.bytes(), expected.data());
    CHECK(memory == expected);
  }
}

TEST_CASE("a barrier waits for all that was submitted before it, and holds up what comes behind") {
  const TestFile file(4 * kMiB);
  std::vector<std::byte> memory(400'000);
  Rig rig = make_rig(Strategy::kBuffered, {}, 16);
  rig.options.staging_bytes = 64 * kChunk;
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t first = pipeline.submit({staged(0, 0, 0, 20'000, memory.data())}, Order::kAppend);
  rig.control->settle();
  const int64_t reads = rig.control->submitted;
  CHECK(reads > 0);
  const int64_t empty = pipeline.submit({}, Order::kBarrier);
  const int64_t second = pipeline.submit({staged(1, 0, 800'000, 20'000, memory.data())}, Order::kBarrier);
  const int64_t third = pipeline.submit({staged(2, 0, 0, 20'000, memory.data() + 100'000)}, Order::kAppend);
  rig.control->settle();
  CHECK(rig.control->submitted == reads);
  CHECK_FALSE(pipeline.wait(empty, 1ms));
  rig.control->permits = reads;
  CHECK(pipeline.wait(first, kLong));
  CHECK(pipeline.wait(empty, kLong));
  rig.control->settle();
  CHECK(rig.control->submitted == 3 * reads);
  CHECK_FALSE(pipeline.wait(second, 1ms));
  CHECK_FALSE(pipeline.wait(third, 1ms));
  rig.control->permits = INT64_MAX;
  CHECK(pipeline.wait(third, kLong));
  CHECK(pipeline.wait(second, kLong));
  CHECK(pipeline.take_landed().size() == 4);
  CHECK(pipeline.take_landed().empty());
}

TEST_CASE("destinations that overlap in segments with barriers keep their order") {
  const TestFile file(2 * kMiB);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    FaultPlan plan;
    plan.seed = seed;
    plan.out_of_order = true;
    plan.max_delay = 30;
    plan.short_chance = 0.3;
    std::vector<std::byte> memory(300'000);
    std::vector<std::byte> expected(300'000);
    Pipeline pipeline(make_rig(Strategy::kBuffered, plan).options);
    pipeline.add_file(file.path(), file.identity());
    Random random(seed);
    int64_t last = -1;
    for (int64_t id = 0; id < 12; ++id) {
      const int64_t bytes = uniform(random, 1, 200'000);
      const int64_t offset = uniform(random, 0, kMiB);
      const int64_t begin = uniform(random, 0, 100'000);
      last = pipeline.submit({contiguous(id, 0, offset, bytes, memory.data() + begin)}, Order::kBarrier);
      std::memcpy(expected.data() + begin, file.bytes() + offset, static_cast<size_t>(bytes));
    }
    CHECK(pipeline.wait(last, kLong));
    CHECK(memory == expected);
  }
}

TEST_CASE("an urgent segment overtakes what has not started") {
  const TestFile file(4 * kMiB);
  std::vector<std::byte> memory(2 * kMiB);
  Rig rig = make_rig(Strategy::kBuffered, {}, 2);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t running = pipeline.submit({staged(0, 0, 0, 200'000, memory.data())}, Order::kAppend);
  const int64_t behind = pipeline.submit({staged(1, 0, 0, 200'000, memory.data() + kMiB)}, Order::kBarrier);
  rig.control->settle();
  const int64_t urgent = pipeline.submit({contiguous(2, 0, 5, 1000, memory.data() + 1'900'000)}, Order::kUrgent);
  rig.control->permits = 3;  // the two that were in flight, and it
  CHECK(pipeline.wait(urgent, kLong));
  CHECK_FALSE(pipeline.wait(running, 20ms));
  CHECK(std::memcmp(memory.data() + 1'900'000, file.bytes() + 5, 1000) == 0);
  CHECK(pipeline.take_landed() == std::vector<int64_t>{urgent});
  rig.control->permits = INT64_MAX;
  CHECK(pipeline.wait(behind, kLong));
}

TEST_CASE("files take turns, the first that came; in order where there is one at a time; what is urgent comes first") {
  const auto order = [](int files_at_once) {
    FileTurns<std::string> turns(files_at_once);
    for (const char* item : {"a1", "a2", "a3", "a4", "b1", "b2", "c1", "a5"}) turns.push_back(item[0], item);
    std::string taken;
    const auto take = [&](const auto& may_be_taken) {
      const auto item = turns.take(may_be_taken);
      taken += item.value_or("none") + " ";
    };
    const auto any = [](const std::string&) { return true; };
    take(any);
    turns.push_front({"x1", "x2"});
    take([](const std::string& item) { return item[0] == 'a'; });  // not past what is urgent
    take(any);
    take(any);
    take([](const std::string& item) { return item[0] != 'b'; });
    while (taken.size() < 36) take(any);
    return taken;
  };
  CHECK(order(1) == "a1 none x1 x2 a2 a3 a4 b1 b2 c1 a5 none ");
  CHECK(order(2) == "a1 none x1 x2 a2 b1 a3 b2 c1 a4 a5 none ");
  CHECK(order(3) == "a1 none x1 x2 c1 a2 b1 a3 b2 a4 a5 none ");
}

TEST_CASE("several files at once are read in turns, and give their bytes") {
  constexpr int64_t kBytes = 10 * kChunk;
  std::vector<std::unique_ptr<TestFile>> files;
  for (uint64_t seed = 0; seed < 4; ++seed) files.push_back(std::make_unique<TestFile>(kBytes, seed + 1));
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kBuffered}) {
    std::vector<std::byte> memory(4 * kBytes);
    FaultPlan plan;
    plan.out_of_order = true;
    plan.max_delay = 5;
    Rig rig = make_rig(strategy, plan, 2);
    rig.options.files_at_once = 2;
    rig.control->permits = 0;
    Pipeline pipeline(rig.options);
    for (const auto& file : files) pipeline.add_file(file->path(), file->identity());
    int64_t last = -1;
    for (int32_t file = 0; file < 4; ++file) {
      last = pipeline.submit({contiguous(file, file, 0, kBytes, memory.data() + file * kBytes)}, Order::kAppend);
    }
    rig.control->permits = 8;
    rig.control->settle();
    const PipelineStats stats = pipeline.stats();
    CHECK(stats.files[0].direct_bytes + stats.files[0].buffered_bytes < 8 * kChunk);
    CHECK(stats.files[1].direct_bytes + stats.files[1].buffered_bytes > 0);
    CHECK(stats.files[2].direct_bytes + stats.files[2].buffered_bytes == 0);
    rig.control->permits = INT64_MAX;
    CHECK(pipeline.wait(last, kLong));
    CHECK(!pipeline.fault());
    for (size_t file = 0; file < 4; ++file) {
      CHECK(pipeline.wait(static_cast<int64_t>(file), kLong));
      CHECK(std::memcmp(memory.data() + file * kBytes, files[file]->bytes(), kBytes) == 0);
    }
  }
}

TEST_CASE("cancel fails what has not landed, at once, and starts nothing more") {
  const TestFile file(4 * kMiB);
  std::vector<std::byte> memory(2 * kMiB);
  // Far apart: one chunk of many reads, of which only some fit the queue.
  const Transfer scattered = make_transfer(0, 0, ElementType::kBytes4, 0, ElementType::kBytes4, memory.data(),
                                           {{200, 10'000, 400}, {100, 4, 4}});
  FaultPlan plan;
  SUBCASE("reads that then succeed") {}
  SUBCASE("reads that then want to be tried again") { plan.interrupt_chance = 0.9; }
  SUBCASE("reads that then fail") { plan.fail_offset = 0; }
  Rig rig = make_rig(Strategy::kBuffered, plan, 4);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({scattered}, Order::kAppend);
  const int64_t behind = pipeline.submit({staged(1, 0, 0, 1000, memory.data() + kMiB)}, Order::kBarrier);
  rig.control->settle();
  CHECK(rig.control->submitted == 4);
  pipeline.cancel();
  CHECK(pipeline.wait(segment, 0ms));
  CHECK(pipeline.wait(behind, 0ms));
  CHECK(pipeline.fault().kind == FaultKind::kCancelled);
  rig.control->permits = INT64_MAX;
  CHECK(becomes([&] { return rig.control->completed == 4; }));
  rig.control->settle();
  CHECK(rig.control->submitted == 4);
  CHECK(pipeline.take_landed().empty());
}

TEST_CASE("the destructor waits for reads in flight, and for no others") {
  const TestFile file(4 * kMiB);
  for (int round = 0; round < 10; ++round) {
    auto memory = std::make_unique<std::byte[]>(2 * kMiB);
    FaultPlan plan;
    plan.max_delay = 20;
    plan.out_of_order = true;
    Rig rig = make_rig(round % 2 == 0 ? Strategy::kBuffered : Strategy::kAuto, plan, 4);
    rig.control->permits = round;
    auto pipeline = std::make_unique<Pipeline>(rig.options);
    pipeline->add_file(file.path(), file.identity());
    pipeline->submit({staged(0, 0, 0, 100'000, memory.get()), contiguous(1, 0, kMiB, kMiB, memory.get() + kMiB)},
                     Order::kAppend);
    pipeline->submit({staged(2, 0, 100, 100'000, memory.get())}, Order::kBarrier);
    rig.control->settle();
    std::thread storage([&] {
      std::this_thread::sleep_for(5ms);
      rig.control->permits = INT64_MAX;
    });
    pipeline.reset();
    memory.reset();  // a read that is still in flight would write to it
    storage.join();
    CHECK(rig.control->completed <= 4 * 2 + round);
  }
}

TEST_CASE("a Pipeline may end at any moment") {
  const TestFile file(4 * kMiB);
  for (int round = 0; round < 60; ++round) {
    auto memory = std::make_unique<std::byte[]>(2 * kMiB);
    FaultPlan plan;
    plan.seed = static_cast<uint64_t>(round);
    plan.out_of_order = true;
    plan.max_delay = 3;
    plan.interrupt_chance = 0.1;
    if (round % 4 == 3) plan.fail_read = round;
    Pipeline pipeline(make_rig(round % 2 == 0 ? Strategy::kBuffered : Strategy::kAuto, plan, 4).options);
    pipeline.add_file(file.path(), file.identity());
    for (int64_t i = 0; i < 8; ++i) {
      pipeline.submit(
          {staged(2 * i, 0, 0, 60'000, memory.get()), contiguous(2 * i + 1, 0, kMiB, 500'000, memory.get() + kMiB)},
          i % 3 == 0 ? Order::kAppend : Order::kBarrier);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round * 50));
    if (round % 3 == 0) pipeline.cancel();
  }
}

TEST_CASE("storage that stops answering ends the load, and what it may still write to stays until it answers") {
  const TestFile file(4 * kMiB);
  auto memory = std::make_unique<std::byte[]>(2 * kMiB);
  bool in_place = true;
  Rig rig = make_rig(Strategy::kBuffered, {}, 4);
  rig.options.io_timeout = 100ms;
  rig.control->permits = 2;
  rig.control->ends = false;
  auto pipeline = std::make_unique<Pipeline>(rig.options);
  pipeline->add_file(file.path(), file.identity());
  Transfer transfer = contiguous(7, 0, 0, 2 * kMiB, memory.get());
  SUBCASE("in place") {}
  SUBCASE("staged") {
    transfer = staged(7, 0, 0, 200'000, memory.get());
    in_place = false;
  }
  const int64_t segment = pipeline->submit({transfer}, Order::kAppend);
  const auto start = std::chrono::steady_clock::now();
  CHECK(pipeline->wait(segment, kLong));
  CHECK(std::chrono::steady_clock::now() - start >= 100ms);
  const Fault fault = pipeline->fault();
  CHECK(fault.kind == FaultKind::kTimeout);
  CHECK(fault.error == ETIMEDOUT);
  CHECK(fault.file == 0);
  CHECK(fault.transfer_id == 7);
  CHECK(fault.offset == 2 * kChunk);  // the oldest that is in flight
  CHECK(pipeline->take_landed().empty());

  CHECK_FALSE(pipeline->stop(10ms));
  CHECK_FALSE(pipeline->stop(0ms));
  std::optional<std::vector<ByteRange>> destinations;
  while (!(destinations = pipeline->destinations_in_flight())) std::this_thread::sleep_for(1ms);  // the lane stops soon
  CHECK(destinations->size() == (in_place ? 4 : 0));
  for (const ByteRange& range : *destinations) {
    CHECK(range.begin >= reinterpret_cast<int64_t>(memory.get()) + 2 * kChunk);
    CHECK(range.end <= reinterpret_cast<int64_t>(memory.get()) + 6 * kChunk);
  }
  rig.control->ends = true;
  CHECK(pipeline->stop(kLong));
  CHECK(pipeline->destinations_in_flight()->empty());
}

TEST_CASE("storage that answers, however slowly, does not run out of time") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(kMiB);
  Rig rig = make_rig(Strategy::kBuffered, {}, 4);
  rig.options.io_timeout = 400ms;
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({contiguous(0, 0, 0, kMiB, memory.data())}, Order::kAppend);
  std::atomic<bool> done{false};
  std::thread storage([&] {  // 16 reads, and a moment between any two that four of them outlast together
    while (!done) {
      std::this_thread::sleep_for(60ms);
      rig.control->permits = 1;
    }
  });
  CHECK(pipeline.wait(segment, kLong));
  done = true;
  storage.join();
  CHECK_FALSE(static_cast<bool>(pipeline.fault()));
  CHECK(std::memcmp(memory.data(), file.bytes(), kMiB) == 0);
}

TEST_CASE("without a time-out storage is waited for") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(kMiB);
  Rig rig = make_rig(Strategy::kBuffered);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({contiguous(0, 0, 0, kMiB, memory.data())}, Order::kAppend);
  CHECK_FALSE(pipeline.wait(segment, 700ms));
  rig.control->permits = INT64_MAX;
  CHECK(pipeline.wait(segment, kLong));
  CHECK_FALSE(static_cast<bool>(pipeline.fault()));
}

TEST_CASE("a read that fails while another is never answered ends the load at once") {
  const TestFile file(4 * kMiB);
  std::vector<std::byte> memory(2 * kMiB);
  FaultPlan plan;
  plan.fail_read = 1;
  Rig rig = make_rig(Strategy::kBuffered, plan, 4);
  rig.options.io_timeout = kLong;
  rig.control->permits = 2;
  rig.control->ends = false;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 2 * kMiB, memory.data())}, Order::kAppend), kLong));
  CHECK(pipeline.fault().error == EIO);
  CHECK_FALSE(pipeline.stop(10ms));
  rig.control->ends = true;
  CHECK(pipeline.stop(kLong));
}

TEST_CASE("a Pipeline that has stopped takes no more work") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  Pipeline pipeline(make_rig(Strategy::kBuffered).options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(pipeline.stop(kLong));
  CHECK(pipeline.destinations_in_flight()->empty());
  CHECK(pipeline.wait(pipeline.submit({contiguous(1, 0, 0, 1000, memory.data())}, Order::kAppend), 0ms));
  CHECK(pipeline.fault().kind == FaultKind::kCancelled);
  CHECK(pipeline.stop(0ms));
}

TEST_CASE("silence is what was listened to") {
  Silence silence;
  std::this_thread::sleep_for(300ms);  // as if stopped: one look does not make up for it
  CHECK(silence.look() <= 200ms);
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(10ms);
    silence.look();
  }
  CHECK(silence.look() >= 300ms);
  silence.end();
  CHECK(silence.look() < 200ms);
}

TEST_CASE("waiting runs out of time, and can be taken up again") {
  const TestFile file(kMiB);
  std::vector<std::byte> memory(1000);
  Rig rig = make_rig(Strategy::kBuffered);
  rig.control->permits = 0;
  Pipeline pipeline(rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment = pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend);
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(pipeline.wait(segment, 50ms));
  CHECK(std::chrono::steady_clock::now() - start >= 50ms);
  CHECK_FALSE(pipeline.wait(segment, 0ms));
  rig.control->permits = INT64_MAX;
  CHECK(pipeline.wait(segment, kLong));
  CHECK_FALSE(static_cast<bool>(pipeline.fault()));
}

TEST_CASE("a segment without transfers has landed") {
  Pipeline pipeline(make_rig(Strategy::kAuto).options);
  const int64_t segment = pipeline.submit({}, Order::kAppend);
  CHECK(pipeline.wait(segment, kLong));
  CHECK(pipeline.wait(pipeline.submit({}, Order::kUrgent), kLong));
  CHECK(pipeline.take_landed().size() == 2);
  CHECK_FALSE(static_cast<bool>(pipeline.fault()));
}

TEST_CASE("the file of an urgent segment stays open until one of another file has landed") {
  const TestFile one(kMiB, 1);
  const TestFile two(kMiB, 2);
  std::vector<std::byte> memory(1000);
  Pipeline pipeline(make_rig(Strategy::kBuffered).options);
  pipeline.add_file(one.path(), one.identity());
  pipeline.add_file(two.path(), two.identity());
  const auto read = [&](int32_t file, Order order) {
    CHECK(pipeline.wait(pipeline.submit({contiguous(0, file, 0, 1000, memory.data())}, order), kLong));
    CHECK(std::memcmp(memory.data(), (file == 0 ? one : two).bytes(), 1000) == 0);
  };
  const int before = count_fds();
  read(0, Order::kAppend);
  const int closed = count_fds();
  read(0, Order::kUrgent);
  CHECK(count_fds() == closed + 1);
  read(0, Order::kUrgent);
  CHECK(count_fds() == closed + 1);
  read(1, Order::kUrgent);
  CHECK(count_fds() == closed + 1);
  CHECK(closed == before);
}

TEST_CASE("files are open only while a segment needs them") {
  const TestFile one(kMiB, 1);
  const TestFile two(kMiB, 2);
  std::vector<std::byte> memory(kMiB);
  Rig rig = make_rig(Strategy::kBuffered);
  Pipeline pipeline(rig.options);
  pipeline.add_file(one.path(), one.identity());
  pipeline.add_file(two.path(), two.identity());
  const int before = count_fds();
  for (int round = 0; round < 3; ++round) {  // opened anew each time
    rig.control->permits = 0;
    const int64_t first = pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend);
    const int64_t both = pipeline.submit(
        {contiguous(1, 0, 0, 1000, memory.data() + 1000), contiguous(2, 1, 0, 1000, memory.data() + 2000)},
        Order::kBarrier);
    CHECK(count_fds() == before + 2);
    rig.control->permits = 1;
    CHECK(pipeline.wait(first, kLong));
    CHECK(count_fds() == before + 2);
    rig.control->permits = INT64_MAX;
    CHECK(pipeline.wait(both, kLong));
    CHECK(count_fds() == before);
  }
}

TEST_CASE("files are opened ahead of their turn, at most so many, and one that can't be is told of in its turn") {
  const TestFile one(kMiB, 1);
  const TestFile two(kMiB, 2);
  const TestFile three(kMiB, 3);
  std::vector<std::byte> memory(1000);
  Rig rig = make_rig(Strategy::kBuffered);
  rig.options.open_ahead = 2;
  Pipeline pipeline(rig.options);
  pipeline.add_file(one.path(), one.identity());
  pipeline.add_file(one.path() + ".gone", one.identity());
  pipeline.add_file(two.path(), two.identity());
  pipeline.add_file(three.path(), three.identity());
  const auto read = [&](int32_t file) {
    CHECK(pipeline.wait(pipeline.submit({contiguous(file, file, 0, 1000, memory.data())}, Order::kAppend), kLong));
  };
  const int before = count_fds();
  read(0);
  CHECK(!pipeline.fault());
  CHECK(count_fds() == before + 1);  // the third; the second is gone
  read(2);
  CHECK(!pipeline.fault());
  CHECK(std::memcmp(memory.data(), two.bytes(), 1000) == 0);
  CHECK(count_fds() == before + 1);  // the fourth
  read(1);
  CHECK(pipeline.fault().kind == FaultKind::kOpen);
  CHECK(pipeline.fault().file == 1);
}

TEST_CASE("what comes opened is not opened again, and is closed as any other") {
  const TestFile one(kMiB, 1);
  const TestFile two(kMiB, 2);
  std::vector<std::byte> memory(1000);
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kBuffered}) {
    const std::string moved = one.path() + ".moved";
    const int before = count_fds();
    {
      Rig rig = make_rig(strategy);
      rig.options.open_ahead = 1;
      Pipeline pipeline(rig.options);
      pipeline.add_file(one.path(), one.identity(), open_both_ways(one.path()));
      pipeline.add_file(two.path(), two.identity());
      CHECK(count_fds() == before + (probe_direct(one.path().c_str()).proven ? 2 : 1));
      std::filesystem::rename(one.path(), moved);
      CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
      std::filesystem::rename(moved, one.path());
      CHECK(!pipeline.fault());
      CHECK(std::memcmp(memory.data(), one.bytes(), 1000) == 0);
      // The other, ahead of its turn.
      CHECK(count_fds() == before + (strategy == Strategy::kAuto && two.can_direct() ? 2 : 1));
    }
    CHECK(count_fds() == before);
  }
}

TEST_CASE("no more files are opened ahead than may be, with those that come opened") {
  const TestFile one(kMiB, 1);
  const TestFile two(kMiB, 2);
  const TestFile three(kMiB, 3);
  std::vector<std::byte> memory(1000);
  Rig rig = make_rig(Strategy::kBuffered);
  rig.options.open_ahead = 1;
  Pipeline pipeline(rig.options);
  const int before = count_fds();
  pipeline.add_file(one.path(), one.identity());
  pipeline.add_file(two.path(), two.identity());
  pipeline.add_file(three.path(), three.identity(), open_both_ways(three.path()));
  const int with_opened = count_fds();
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(count_fds() == with_opened);
  CHECK(with_opened > before);
}

TEST_CASE("files that were passed over are closed, and make room; not for what is urgent") {
  std::vector<std::unique_ptr<TestFile>> files;
  std::vector<std::byte> memory(1000);
  Rig rig = make_rig(Strategy::kBuffered);
  rig.options.open_ahead = 2;
  Pipeline pipeline(rig.options);
  for (uint64_t seed = 0; seed < 7; ++seed) files.push_back(std::make_unique<TestFile>(kMiB, seed + 1));
  const int before = count_fds();
  for (size_t i = 0; i < files.size(); ++i) {
    pipeline.add_file(files[i]->path(), files[i]->identity(), i < 2 ? open_both_ways(files[i]->path()) : OpenedFile{});
  }
  const int opened = count_fds() - before;
  const auto read = [&](int32_t file, Order order) {
    CHECK(pipeline.wait(pipeline.submit({contiguous(file, file, 0, 1000, memory.data())}, order), kLong));
    CHECK(!pipeline.fault());
    CHECK(std::memcmp(memory.data(), files[static_cast<size_t>(file)]->bytes(), 1000) == 0);
  };
  read(6, Order::kUrgent);
  CHECK(count_fds() == before + opened + 1);  // it lingers
  read(3, Order::kAppend);
  CHECK(count_fds() == before + 1 + 2);  // the two that follow
  read(0, Order::kAppend);
  read(4, Order::kAppend);
  CHECK(count_fds() == before + 1 + 1);
}

TEST_CASE("what came opened, and is another file than the one whose header was parsed, is opened again") {
  const TestFile one(kMiB, 1);
  const TestFile two(kMiB, 2);
  std::vector<std::byte> memory(1000);
  Pipeline pipeline(make_rig(Strategy::kAuto).options);
  pipeline.add_file(one.path(), one.identity(), open_both_ways(two.path()));
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(!pipeline.fault());
  CHECK(std::memcmp(memory.data(), one.bytes(), 1000) == 0);
}

TEST_CASE("what could not be opened in advance is told of in its turn") {
  const TestFile one(kMiB, 1);
  std::vector<std::byte> memory(1000);
  const std::string gone = one.path() + ".gone";
  Pipeline pipeline(make_rig(Strategy::kAuto).options);
  pipeline.add_file(gone, one.identity(), open_both_ways(gone));
  CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, 1000, memory.data())}, Order::kAppend), kLong));
  CHECK(pipeline.fault().kind == FaultKind::kOpen);
  CHECK(pipeline.fault().error == ENOENT);
}

TEST_CASE("the first reads do not wait until every staging buffer is registered") {
  class Registering final : public FaultyReader {
   public:
    explicit Registering(std::shared_ptr<std::string> calls) : FaultyReader(8, {}), calls_(std::move(calls)) {}
    int register_buffer(std::byte*, size_t) override {
      calls_->push_back('r');
      return 0;
    }
    int submit(std::span<const ReadRequest> requests) override {
      calls_->push_back('s');
      return FaultyReader::submit(requests);
    }

   private:
    const std::shared_ptr<std::string> calls_;
  };
  const TestFile file(4 * kMiB);
  std::vector<std::byte> memory(2 * kMiB);
  auto calls = std::make_shared<std::string>();
  PipelineOptions options = make_rig(Strategy::kBuffered).options;
  options.chunk_bytes = kMiB;
  options.staging_bytes = 4 * kMiB;
  options.make_reader = [&](bool, std::string*) { return std::make_unique<Registering>(calls); };
  Pipeline pipeline(options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(pipeline.submit({staged(0, 0, 0, 500'000, memory.data())}, Order::kAppend), kLong));
  CAPTURE(*calls);
  CHECK(std::ranges::count(*calls, 'r') > 1);
  CHECK(calls->find("rr") == std::string::npos);
}

TEST_CASE("no thread and no descriptor is left when a Pipeline has ended") {
  const TestFile file(4 * kMiB);
  const int fds = count_fds();
  const int threads = count_threads();
  for (const Backend backend : {Backend::kAuto, Backend::kPread}) {
    for (const Strategy strategy : {Strategy::kBuffered, Strategy::kAuto, Strategy::kDirect}) {
      for (const bool in_the_middle : {false, true}) {
        if (strategy == Strategy::kDirect && !can_direct()) continue;
        Load load(2, {&file});
        {
          Pipeline pipeline(real_options(strategy, backend));
          CHECK(count_threads() == threads);  // they start with the first segment
          load.add_files(pipeline);
          if (in_the_middle) {
            pipeline.submit(load.transfers(), Order::kAppend);
          } else {
            CHECK(load.run(pipeline));
          }
        }
        CHECK(becomes([&] { return count_fds() == fds && count_threads() == threads; }));
      }
    }
  }
}

TEST_CASE("two Pipelines run side by side") {
  const TestFile one(3 * kMiB, 1);
  const TestFile two(3 * kMiB, 2);
  std::atomic<int> landed{0};
  const auto load = [&](uint64_t seed) {
    Load load(seed, {&one, &two}, 60);
    FaultPlan plan;
    plan.seed = seed;
    plan.short_chance = 0.3;
    plan.out_of_order = true;
    Pipeline pipeline(make_rig(Strategy::kAuto, plan).options);
    load.add_files(pipeline);
    landed += load.run(pipeline);
  };
  for (uint64_t round = 0; round < 4; ++round) {
    std::thread first(load, 2 * round);
    std::thread second(load, 2 * round + 1);
    first.join();
    second.join();
  }
  CHECK(landed == 8);
}

TEST_CASE("files may be added and progress be watched while a load runs") {
  const TestFile one(3 * kMiB, 1);
  const TestFile two(3 * kMiB, 2);
  FaultPlan plan;
  plan.max_delay = 5;
  plan.out_of_order = true;
  Load load(11, {&one, &two}, 100);
  Pipeline pipeline(make_rig(Strategy::kAuto, plan).options);
  load.add_files(pipeline);
  std::atomic<bool> done{false};
  std::thread adder([&] {
    while (!done) {
      pipeline.add_file("/nowhere", {});
      std::this_thread::sleep_for(20us);
    }
  });
  int64_t most = 0;
  bool ascends = true;
  std::thread watcher([&] {
    while (!done) {
      const int64_t landed = pipeline.bytes_landed();
      ascends = ascends && landed >= most;
      most = landed;
      pipeline.direct_io(0);
      pipeline.fault();
      if (pipeline.stats().bytes_read < 0) return;
    }
  });
  std::this_thread::sleep_for(2ms);
  CHECK(load.run(pipeline));
  done = true;
  adder.join();
  watcher.join();
  CHECK(ascends);
}

TEST_CASE("fresh memory is read into in place") {
  constexpr int64_t kSize = 20 * kMiB;
  const TestFile file(kSize + 4096 + 123);
  for (const Strategy strategy : {Strategy::kBuffered, Strategy::kDirect}) {
    if (strategy == Strategy::kDirect && !can_direct()) continue;
    for (const bool faulty : {false, true}) {
      CAPTURE(static_cast<int>(strategy));
      CAPTURE(faulty);
      const Memory memory(kSize);
      FaultPlan plan;
      plan.short_chance = 0.5;
      plan.out_of_order = true;
      PipelineOptions options = faulty ? make_rig(strategy, plan).options : real_options(strategy, Backend::kAuto);
      options.chunk_bytes = kMiB;
      options.staging_bytes = 8 * kMiB;
      Pipeline pipeline(options);
      pipeline.add_file(file.path(), file.identity());
      const int64_t segment = pipeline.submit({contiguous(0, 0, 4096, kSize - 100, memory.data())}, Order::kAppend);
      CHECK(pipeline.wait(segment, kLong));
      CHECK_FALSE(static_cast<bool>(pipeline.fault()));
      CHECK(std::memcmp(memory.data(), file.bytes() + 4096, kSize - 100) == 0);
      CHECK(memory.data()[kSize - 1] == std::byte{0});
      const PipelineStats stats = pipeline.stats();
      CHECK(stats.in_place_bytes >= kSize - 8192);
      CHECK(stats.in_place_bytes <= kSize - 100);
      CHECK(stats.bytes_needed == kSize - 100);
      CHECK(pipeline.bytes_landed() == kSize - 100);
      check_stats(pipeline);
    }
  }
}

TEST_CASE("memory is the caller's again once a segment has landed, though its pages were being made ready") {
  if (!can_direct()) return;
  constexpr int64_t kLarge = 128 * kMiB;
  constexpr int64_t kSmall = 4 * kMiB;
  const TestFile large(0);
  REQUIRE(::ftruncate(large.fd(), kLarge) == 0);
  const TestFile small(kSmall);
  const Memory first(kLarge);
  const Memory second(2 * kSmall);
  PipelineOptions options = real_options(Strategy::kAuto, Backend::kAuto);
  options.chunk_bytes = kMiB;
  options.staging_bytes = 8 * kMiB;
  Pipeline pipeline(options);
  pipeline.add_file(large.path(), large.identity());
  pipeline.add_file(small.path(), small.identity());
  // The preparer has the first segment's pages to do before it comes to the second's, whose reads don't wait for it:
  // bytes that two transfers need go through staging.
  pipeline.submit({contiguous(0, 0, 0, kLarge, first.data())}, Order::kAppend);
  const int64_t segment =
      pipeline.submit({contiguous(1, 1, 0, kSmall, second.data()), contiguous(2, 1, 0, kSmall, second.data() + kSmall)},
                      Order::kAppend);
  CHECK(pipeline.wait(segment, kLong));
  CHECK(std::memcmp(second.data(), small.bytes(), kSmall) == 0);
  CHECK(std::memcmp(second.data() + kSmall, small.bytes(), kSmall) == 0);
  REQUIRE(::mmap(second.data(), 2 * kSmall, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
          second.data());
  std::this_thread::sleep_for(100ms);
  const auto begin = reinterpret_cast<int64_t>(second.data());
  CHECK(pages_untouched({begin, begin + 2 * kSmall}));
}

TEST_CASE("huge pages are tried on untouched memory alone, within the ranges, and too little of it is not tried") {
  constexpr int64_t kBytes = 32 * kMiB;
  const Memory memory(kBytes);
  const auto begin = reinterpret_cast<int64_t>(memory.data());
  const std::array few = {ByteRange{begin, begin + 4 * kHugePageBytes}};
  CHECK(huge_pages_come_sooner(few));
  CHECK(pages_untouched({begin, begin + kBytes}));
  const std::array many = {ByteRange{begin, begin + 3 * kMiB}, ByteRange{begin + 5 * kMiB, begin + 16 * kMiB}};
  huge_pages_come_sooner(many);  // whichever way: that is the machine's
  CHECK(!pages_untouched({begin, begin + 16 * kMiB}));
  CHECK(pages_untouched({begin + 16 * kMiB, begin + kBytes}));
  CHECK(std::all_of(memory.data(), memory.data() + kBytes, [](std::byte value) { return value == std::byte{0}; }));
}

}  // namespace weightlift

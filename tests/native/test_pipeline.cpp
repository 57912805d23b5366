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
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "faulty_reader.h"
#include "granule_op.h"
#include "readers/make_reader.h"
#include "readers/pread_reader.h"
#include "readers/probe.h"
#include "readers/uring_reader.h"
#include "staging/plan_files.h"
#include "transform/copy.h"
#include "util/unique_fd.h"

namespace weightlift {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Random = std::mt19937_64;
using Order = Pipeline::Order;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kChunk = 64 * kKiB;
constexpr auto kLong = std::chrono::milliseconds(60'000);  // what takes longer hangs

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// A file of random bytes, written back, gone at the end of the scope.
class TestFile {
 public:
  explicit TestFile(int64_t size, uint64_t seed = 1, const fs::path& folder = fs::temp_directory_path())
      : bytes_(static_cast<size_t>(size)) {
    Random random(seed);
    for (size_t i = 0; i < bytes_.size(); i += 8) {
      const uint64_t value = random();
      std::memcpy(bytes_.data() + i, &value, std::min<size_t>(8, bytes_.size() - i));
    }
    path_ = (folder / "weightlift-XXXXXX").string();
    fd_ = UniqueFd(::mkstemp(path_.data()));
    REQUIRE(fd_);
    REQUIRE(::write(fd_.get(), bytes_.data(), bytes_.size()) == size);
    REQUIRE(::fsync(fd_.get()) == 0);
  }
  ~TestFile() { ::unlink(path_.c_str()); }

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  const std::byte* bytes() const { return bytes_.data(); }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  FileIdentity identity() const {
    struct stat st{};
    REQUIRE(::fstat(fd_.get(), &st) == 0);
    return {st.st_size, st.st_dev, st.st_ino, int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec};
  }
  bool can_direct() const { return probe_direct(path_.c_str()).usable; }

 private:
  std::string path_;
  UniqueFd fd_;
  std::vector<std::byte> bytes_;
};

// What a test sees of the readers of a Pipeline, and how it holds them up. Shared by both lanes.
struct Control {
  std::atomic<int64_t> permits{INT64_MAX};  // completions that may still be handed out
  std::atomic<int64_t> submitted{0};
  std::atomic<int64_t> completed{0};
  std::atomic<int64_t> max_in_flight{0};
  std::atomic<bool> ends{true};  // whether a reader that is destroyed is answered

  // Until nothing is submitted any more.
  void settle() const {
    for (int64_t before = -1; before != submitted;) {
      before = submitted;
      std::this_thread::sleep_for(30ms);
    }
  }
};

// A FaultyReader that is held to the alignment of direct I/O, though its short reads need not keep it, and that hands
// completions out as a test permits.
class TestReader final : public Reader {
 public:
  TestReader(int queue_depth, const FaultPlan& plan, std::shared_ptr<Control> control)
      : control_(std::move(control)), reader_(queue_depth, plan) {}
  ~TestReader() override {
    while (!control_->ends) std::this_thread::sleep_for(1ms);
  }

  std::string_view name() const override { return reader_.name(); }
  int queue_depth() const override { return reader_.queue_depth(); }

  int submit(std::span<const ReadRequest> requests) override {
    std::vector<ReadRequest> buffered(requests.begin(), requests.end());
    for (ReadRequest& request : buffered) {
      const int flags = ::fcntl(request.fd, F_GETFL);
      if (flags < 0) broken("reads from a descriptor that is closed");
      if ((flags & O_DIRECT) == 0) continue;
      const std::string path = "/proc/self/fd/" + std::to_string(request.fd);
      const DirectIo direct_io = probe_direct(path.c_str());
      if (request.offset % direct_io.offset_alignment != 0 || request.length % direct_io.offset_alignment != 0 ||
          reinterpret_cast<int64_t>(request.buffer) % direct_io.memory_alignment != 0) {
        broken("a direct read is not aligned");
      }
      UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      request.fd = fd.get();
      fds_.push_back(std::move(fd));  // until the end: few in a test, and completions may come late
    }
    const int result = reader_.submit(buffered);
    if (result == 0) {
      control_->submitted += static_cast<int64_t>(requests.size());
      int64_t most = control_->max_in_flight;
      while (most < reader_.in_flight() && !control_->max_in_flight.compare_exchange_weak(most, reader_.in_flight())) {
      }
    }
    return result;
  }

  int wait(std::span<ReadCompletion> out, std::chrono::milliseconds timeout) override {
    const int64_t permits = std::min<int64_t>(control_->permits, static_cast<int64_t>(out.size()));
    if (permits <= 0) {
      std::this_thread::sleep_for(1ms);
      return 0;
    }
    const int n = reader_.wait(out.first(static_cast<size_t>(permits)), timeout);
    if (n > 0) {
      control_->permits -= n;
      control_->completed += n;
    }
    return n;
  }

 private:
  static void broken(const char* what) {
    std::fprintf(stderr, "TestReader: the caller broke the contract: %s\n", what);
    std::abort();
  }

  std::shared_ptr<Control> control_;
  std::vector<UniqueFd> fds_;
  FaultyReader reader_;  // last: it reads when it ends
};

struct Rig {
  PipelineOptions options;
  std::shared_ptr<Control> control = std::make_shared<Control>();
};

Rig make_rig(Strategy strategy, const FaultPlan& plan = {}, int queue_depth = 8) {
  Rig rig;
  rig.options.strategy = strategy;
  rig.options.chunk_bytes = kChunk;
  rig.options.staging_bytes = 8 * kChunk;
  rig.options.merge_gap_bytes = 4 * kKiB;
  rig.options.make_reader = [plan, queue_depth, control = rig.control](bool direct, std::string*) {
    FaultPlan of_lane = plan;
    of_lane.seed += direct;
    return std::make_unique<TestReader>(queue_depth, of_lane, control);
  };
  return rig;
}

PipelineOptions real_options(Strategy strategy, Backend backend) {
  PipelineOptions options = make_rig(strategy).options;
  options.make_reader = [backend](bool direct, std::string* fallback) {
    return make_reader({backend, 8, 2}, direct, fallback);
  };
  return options;
}

const GranuleOp& op_of(const Transfer& transfer) { return dynamic_cast<const GranuleOp&>(*transfer.op); }

// The same transfer with another destination.
Transfer onto(Transfer transfer, std::byte* dst) {
  transfer.dst = dst;
  if (transfer.op) transfer.op = op_of(transfer).onto(dst);
  return transfer;
}

// Carries a transfer out by a loop over its elements; `dst` stands for transfer.dst.
void copy_naively(const Transfer& transfer, const std::byte* file, std::byte* dst) {
  if (transfer.op) {
    const OpSource& source = transfer.op->source();
    const int64_t row_stride = source.num_rows > 1 ? source_byte(transfer, source.row_bytes) : source.row_bytes;
    return op_of(transfer).onto(dst)->run(file + transfer.src_offset, row_stride, 0, source.num_rows);
  }
  const int64_t item = element_bytes(transfer.src_type);
  for (int64_t i = 0, count = transfer.num_elements(); i < count; ++i) {
    int64_t src_at = transfer.src_offset;
    int64_t dst_at = 0;
    int64_t rest = i;
    for (const Dim& dim : transfer.dims) {
      src_at += rest % dim.size * dim.src_stride;
      dst_at += rest % dim.size * dim.dst_stride;
      rest /= dim.size;
    }
    if (transfer.src_type == transfer.dst_type) {
      std::memcpy(dst + dst_at, file + src_at, static_cast<size_t>(item));
    } else {
      const Transfer one{0, 0, transfer.src_type, transfer.dst_type, 0, dst + dst_at, {}};
      copy_elements(one, 0, 1, file + src_at, 0);
    }
  }
}

Transfer contiguous(int64_t id, int32_t file, int64_t offset, int64_t bytes, std::byte* dst) {
  return make_transfer(id, file, ElementType::kBytes1, offset, ElementType::kBytes1, dst, {{bytes, 1, 1}});
}

// Every second one of `count` numbers: never in place, one read per chunk.
Transfer staged(int64_t id, int32_t file, int64_t offset, int64_t count, std::byte* dst) {
  return make_transfer(id, file, ElementType::kBytes4, offset, ElementType::kBytes4, dst, {{count, 8, 4}});
}

// Page-aligned memory, untouched.
class Memory {
 public:
  explicit Memory(int64_t size) : size_(static_cast<size_t>(size)) {
    data_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(data_ != MAP_FAILED);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { ::munmap(data_, size_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  size_t size_;
  void* data_;
};

// Transfers of all shapes from a few files to one memory, and what they must leave there.
class Load {
 public:
  Load(uint64_t seed, const std::vector<const TestFile*>& files, int64_t count = 40) : files_(files) {
    Random random(seed);
    int64_t used = 0;
    for (int64_t id = 0; id < count; ++id) {
      const auto file = static_cast<int32_t>(uniform(random, 0, static_cast<int64_t>(files.size()) - 1));
      used += uniform(random, 0, 1) * uniform(random, 0, 300);
      transfers_.push_back(random_transfer(random, id, file, reinterpret_cast<std::byte*>(used)));
      used = Region::destination_of(transfers_.back()).bounds().end;
    }
    got_.resize(static_cast<size_t>(used));
    expected_.resize(static_cast<size_t>(used));
    for (Transfer& transfer : transfers_) {
      const auto at = reinterpret_cast<int64_t>(transfer.dst);
      copy_naively(transfer, files_[static_cast<size_t>(transfer.file)]->bytes(), expected_.data() + at);
      transfer = onto(std::move(transfer), got_.data() + at);
    }
  }

  void add_files(Pipeline& pipeline) const {
    for (const TestFile* file : files_) pipeline.add_file(file->path(), file->identity());
  }

  // In segments of a few transfers. Returns whether all landed, with the right bytes.
  bool run(Pipeline& pipeline) {
    std::vector<int64_t> segments;
    for (size_t begin = 0; begin < transfers_.size(); begin += 15) {
      const size_t end = std::min(transfers_.size(), begin + 15);
      segments.push_back(pipeline.submit({transfers_.begin() + static_cast<std::ptrdiff_t>(begin),
                                          transfers_.begin() + static_cast<std::ptrdiff_t>(end)},
                                         begin % 2 == 0 ? Order::kAppend : Order::kBarrier));
    }
    for (const int64_t segment : segments) {
      if (!pipeline.wait(segment, kLong)) return false;
    }
    return !pipeline.fault() && pipeline.take_landed().size() == segments.size() && got_ == expected_;
  }

  const std::vector<Transfer>& transfers() const { return transfers_; }

 private:
  Transfer random_transfer(Random& random, int64_t id, int32_t file, std::byte* dst) const {
    const int64_t size = files_[static_cast<size_t>(file)]->size();
    std::vector<Dim> dims;
    ElementType src = ElementType::kBytes2;
    ElementType dst_type = ElementType::kBytes2;
    switch (uniform(random, 0, 6)) {
      case 0: {  // whole, large enough to be read in place
        const int64_t bytes = uniform(random, 1, std::min(size, 300 * kKiB));
        return contiguous(id, file, uniform(random, 0, size - bytes), bytes, dst);
      }
      case 1:  // converted
        src = ElementType::kFloat32;
        dst_type = ElementType::kBFloat16;
        dims = {{uniform(random, 1, 30'000), 4, 2}};
        break;
      case 2: {  // columns
        const int64_t taken = uniform(random, 1, 200);
        dims = {{uniform(random, 1, 60), (taken + uniform(random, 0, 1500)) * 2, taken * 2}, {taken, 2, 2}};
        break;
      }
      case 3: {  // transposed
        const int64_t rows = uniform(random, 1, 150);
        const int64_t columns = uniform(random, 1, 150);
        dims = {{rows, columns * 2, 2}, {columns, 2, rows * 2}};
        break;
      }
      case 4: {  // an op, of rows side by side or apart; granules from a row to more than staging holds
        const int64_t row_bytes = uniform(random, 1, 5000);
        const int64_t row_stride = row_bytes + uniform(random, 0, 2) * uniform(random, 0, 5000);
        const int64_t num_rows = uniform(random, 1, std::min(size / row_stride, int64_t{150}));
        constexpr int64_t kGranules[] = {1, 2, 16, 150};
        const OpSource source{num_rows, row_bytes, std::min(num_rows, kGranules[uniform(random, 0, 3)])};
        auto op = std::make_shared<GranuleOp>(source, dst, row_bytes + uniform(random, 0, 3));
        const int64_t extent = (num_rows - 1) * row_stride + row_bytes;
        return make_op_transfer(id, file, uniform(random, 0, size - extent), row_stride, std::move(op));
      }
      default:  // repeated
        dims = {{uniform(random, 1, 5), 0, 2000}, {uniform(random, 1, 1000), 2, 2}};
    }
    const Transfer transfer = make_transfer(id, file, src, 0, dst_type, dst, dims);
    return make_transfer(id, file, src, uniform(random, 0, size - source_bounds(transfer).size()), dst_type, dst,
                         std::move(dims));
  }

  std::vector<const TestFile*> files_;
  std::vector<Transfer> transfers_;
  std::vector<std::byte> got_;
  std::vector<std::byte> expected_;
};

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

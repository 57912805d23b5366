// What tests of a Pipeline share: files, readers that a test holds up, and loads of transfers of all shapes.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "faulty_reader.h"
#include "granule_op.h"
#include "readers/make_reader.h"
#include "readers/probe.h"
#include "staging/pipeline.h"
#include "transform/copy.h"
#include "util/unique_fd.h"

namespace weightlift {

using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Random = std::mt19937_64;
using Order = Pipeline::Order;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kChunk = 64 * kKiB;
constexpr auto kLong = std::chrono::milliseconds(60'000);  // what takes longer hangs

inline int64_t uniform(Random& random, int64_t low, int64_t high) {
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

inline Rig make_rig(Strategy strategy, const FaultPlan& plan = {}, int queue_depth = 8) {
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

inline PipelineOptions real_options(Strategy strategy, Backend backend) {
  PipelineOptions options = make_rig(strategy).options;
  options.make_reader = [backend](bool direct, std::string* fallback) {
    return make_reader({backend, 8, 2}, direct, fallback);
  };
  return options;
}

inline const GranuleOp& op_of(const Transfer& transfer) { return dynamic_cast<const GranuleOp&>(*transfer.op); }

// The same transfer with another destination.
inline Transfer onto(Transfer transfer, std::byte* dst) {
  transfer.dst = dst;
  if (transfer.op) transfer.op = op_of(transfer).onto(dst);
  return transfer;
}

// Carries a transfer out by a loop over its elements; `dst` stands for transfer.dst.
inline void copy_naively(const Transfer& transfer, const std::byte* file, std::byte* dst) {
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

inline Transfer contiguous(int64_t id, int32_t file, int64_t offset, int64_t bytes, std::byte* dst) {
  return make_transfer(id, file, ElementType::kBytes1, offset, ElementType::kBytes1, dst, {{bytes, 1, 1}});
}

// Every second one of `count` numbers: never in place, one read per chunk.
inline Transfer staged(int64_t id, int32_t file, int64_t offset, int64_t count, std::byte* dst) {
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

// Transfers of all shapes from a few files to one memory a place (kHost, devices), and what they must leave there.
class Load {
 public:
  Load(uint64_t seed, const std::vector<const TestFile*>& files, int64_t count = 40,
       const std::vector<int32_t>& places = {kHost})
      : files_(files) {
    Random random(seed);
    int64_t used = 0;
    for (int64_t id = 0; id < count; ++id) {
      const auto file = static_cast<int32_t>(uniform(random, 0, static_cast<int64_t>(files.size()) - 1));
      used += uniform(random, 0, 1) * uniform(random, 0, 300);
      transfers_.push_back(random_transfer(random, id, file, reinterpret_cast<std::byte*>(used)));
      used = Region::destination_of(transfers_.back()).bounds().end;
    }
    for (const int32_t place : places) {
      got_[place].resize(static_cast<size_t>(used));
      expected_[place].resize(static_cast<size_t>(used));
    }
    for (Transfer& transfer : transfers_) {
      const auto at = reinterpret_cast<int64_t>(transfer.dst);
      transfer.device = places[static_cast<size_t>(uniform(random, 0, static_cast<int64_t>(places.size()) - 1))];
      copy_naively(transfer, files_[static_cast<size_t>(transfer.file)]->bytes(),
                   expected_[transfer.device].data() + at);
      transfer = onto(std::move(transfer), got_[transfer.device].data() + at);
    }
  }

  void add_files(Pipeline& pipeline) const {
    for (const TestFile* file : files_) pipeline.add_file(file->path(), file->identity());
  }

  // In segments of a few transfers. Returns whether all landed, with the right bytes.
  bool run(Pipeline& pipeline, const DeviceCaller& caller = {}) {
    std::vector<int64_t> segments;
    for (size_t begin = 0; begin < transfers_.size(); begin += 15) {
      const size_t end = std::min(transfers_.size(), begin + 15);
      segments.push_back(pipeline.submit({transfers_.begin() + static_cast<std::ptrdiff_t>(begin),
                                          transfers_.begin() + static_cast<std::ptrdiff_t>(end)},
                                         begin % 2 == 0 ? Order::kAppend : Order::kBarrier, caller));
    }
    for (const int64_t segment : segments) {
      if (!pipeline.wait(segment, kLong)) return false;
    }
    return !pipeline.fault() && pipeline.take_landed().size() == segments.size() && got_ == expected_;
  }

  const std::vector<Transfer>& transfers() const { return transfers_; }
  ByteRange memory(int32_t place) const {
    const auto begin = reinterpret_cast<int64_t>(got_.at(place).data());
    return {begin, begin + static_cast<int64_t>(got_.at(place).size())};
  }

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
  std::map<int32_t, std::vector<std::byte>> got_;
  std::map<int32_t, std::vector<std::byte>> expected_;
};

}  // namespace weightlift

// One load of one file through a Pipeline, judged: what the guest of `make test-storage` runs, scenario by scenario.
//
//   load_file make PATH        writes the file of known bytes that the others read
//   load_file where PATH       the byte of the device that holds kFaultOffset of the file
//   load_file probe PATH       what the readers find out about the file, in one line
//   load_file load PATH reader=io_uring|pread strategy=auto|direct|buffered [option=value ...]
//     expect=A|B         how it has to end (default landed): landed, open:ERRNO, read:ERRNO, changed, end_of_file,
//                        timeout
//     during=COMMAND     run by a shell when the first read has completed, while others are still to come; all wait
//     then=COMMAND       run after a time-out: storage answers again
//     timeout_ms=N       io_timeout of the Pipeline (default: none)
//     page_cache=keep|leave
//     cached=yes         the file is read into the page cache first (default: it is dropped from there)
//     registered=yes|no  whether staging buffers have to be registered, or must not be (default: either)
//
//   load_file measure PATH reader=io_uring|pread|reference strategy=direct|buffered
//                                         all of it by what benchmarks measure with; no figure is judged
//
// Prints one line, what was found, and exits with 0 when that is right, 1 when it is wrong, 2 when it can't be told.

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "measure/measure_reads.h"
#include "plan/transfer.h"
#include "readers/make_reader.h"
#include "readers/probe.h"
#include "readers/residency.h"
#include "staging/pipeline.h"
#include "util/unique_fd.h"

namespace {

using namespace weightlift;
using namespace std::chrono_literals;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kChunk = kMiB;  // the least that staging buffers are registered for
constexpr int kQueueDepth = 4;    // of 14 reads, so that most begin after what happens during the load

// The tensors, in the order of the file.
constexpr int64_t kLargeOffset = 8200;
constexpr int64_t kLargeBytes = 8 * kMiB + 12;  // enough to be given huge pages, and to be read into in place
constexpr int64_t kRows = 1000, kRowBytes = 3000, kColumn = 100, kColumns = 1001;
constexpr int64_t kMatrixOffset = kLargeOffset + kLargeBytes;
constexpr int64_t kRaggedOffset = kMatrixOffset + kRows * kRowBytes;
constexpr int64_t kRaggedBytes = 3 * kMiB + 5;
constexpr int64_t kFileBytes = kRaggedOffset + kRaggedBytes;
// Where a bad block is put: in the large tensor, well behind what is in flight when the first read completes.
constexpr int64_t kFaultOffset = kLargeOffset + 7 * kMiB;

std::byte byte_of_file(int64_t i) { return static_cast<std::byte>((i * 2654435761u >> 11) ^ (i >> 20)); }

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

UniqueFd open_file(const std::string& path, int flags = O_RDONLY) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!fd) throw_errno(path);
  return fd;
}

// Fresh memory, aligned to the page, that nobody has touched.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw_errno("mmap");
    data_ = static_cast<std::byte*>(memory);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { ::munmap(data_, bytes_); }
  std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  std::byte* data_;
};

// What a load fills, with neighbours that it must not touch.
class Destinations {
 public:
  std::vector<Transfer> transfers() const {
    return {
        make_transfer(0, 0, ElementType::kBytes1, kLargeOffset, ElementType::kBytes1, large(), {{kLargeBytes, 1, 1}}),
        make_transfer(1, 0, ElementType::kBytes1, kMatrixOffset + kColumn, ElementType::kBytes1, matrix(),
                      {{kRows, kRowBytes, kColumns}, {kColumns, 1, 1}}),
        make_transfer(2, 0, ElementType::kBytes1, kRaggedOffset, ElementType::kBytes1, ragged(),
                      {{kRaggedBytes, 1, 1}})};
  }

  // Of all three; what does not hold the file's bytes is named, "" if all do.
  std::string wrong() const {
    for (int64_t i = 0; i < kLargeBytes; ++i) {
      if (large()[i] != byte_of_file(kLargeOffset + i)) return "large tensor, byte " + std::to_string(i);
    }
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const int64_t at = kMatrixOffset + i / kColumns * kRowBytes + kColumn + i % kColumns;
      if (matrix()[i] != byte_of_file(at)) return "matrix, element " + std::to_string(i);
    }
    for (int64_t i = 0; i < kRaggedBytes; ++i) {
      if (ragged()[i] != byte_of_file(kRaggedOffset + i)) return "ragged tensor, byte " + std::to_string(i);
    }
    if (large()[-1] != std::byte{} || large()[kLargeBytes] != std::byte{} || ragged()[-1] != std::byte{} ||
        ragged()[kRaggedBytes] != std::byte{} || matrix()[kRows * kColumns] != std::byte{}) {
      return "memory beside a tensor";
    }
    return "";
  }

  std::vector<std::byte> copy() const { return {memory_.data(), memory_.data() + kAll}; }
  // Whether nothing has changed since the copy was made, but in `ranges` of addresses.
  bool changed_only_in(const std::vector<ByteRange>& ranges, const std::vector<std::byte>& before) const {
    const auto base = reinterpret_cast<int64_t>(memory_.data());
    for (int64_t i = 0; i < kAll; ++i) {
      const bool allowed =
          std::ranges::any_of(ranges, [&](ByteRange range) { return range.begin <= base + i && base + i < range.end; });
      if (!allowed && memory_.data()[i] != before[static_cast<size_t>(i)]) return false;
    }
    return true;
  }

 private:
  // Four bytes from where it would lie as it does in the file, to 512 bytes: only a device that takes memory aligned to
  // 4 reads into it in place.
  static constexpr int64_t kLargeAt = 2 * kMiB + kLargeOffset % 512 + 4;
  static constexpr int64_t kMatrixAt = 12 * kMiB;
  static constexpr int64_t kRaggedAt = 14 * kMiB + 1;
  static constexpr int64_t kAll = 18 * kMiB;

  std::byte* large() const { return memory_.data() + kLargeAt; }
  std::byte* matrix() const { return memory_.data() + kMatrixAt; }
  std::byte* ragged() const { return memory_.data() + kRaggedAt; }

  Memory memory_{kAll};
};

using Options = std::map<std::string, std::string>;

// What the readers of a Pipeline have been told, and what they do to the world.
struct Observer {
  std::string during;  // a command, once
  std::atomic<bool> done{false};
  std::atomic<int> num_registered{0};
  std::atomic<int> num_refused{0};  // registrations
};

void run_command(const std::string& command) {
  const int status = std::system(command.c_str());
  if (status != 0) throw std::runtime_error("'" + command + "' gave " + std::to_string(status));
}

// A real Reader that holds the first completion back until a command has been run.
class ObservedReader final : public Reader {
 public:
  ObservedReader(std::unique_ptr<Reader> reader, std::shared_ptr<Observer> observer)
      : reader_(std::move(reader)), observer_(std::move(observer)) {}

  std::string_view name() const override { return reader_->name(); }
  int queue_depth() const override { return reader_->queue_depth(); }
  int submit(std::span<const ReadRequest> requests) override { return reader_->submit(requests); }
  int wait(std::span<ReadCompletion> out, std::chrono::milliseconds timeout) override {
    const int n = reader_->wait(out, timeout);
    if (n > 0 && !observer_->during.empty() && !observer_->done.exchange(true)) run_command(observer_->during);
    return n;
  }
  int register_buffer(std::byte* buffer, size_t length) override {
    const int index = reader_->register_buffer(buffer, length);
    ++(index < 0 ? observer_->num_refused : observer_->num_registered);
    return index;
  }
  int register_file(int fd) override { return reader_->register_file(fd); }

 private:
  std::unique_ptr<Reader> reader_;
  std::shared_ptr<Observer> observer_;
};

std::string take(Options& options, const std::string& name, const std::string& otherwise) {
  const auto node = options.extract(name);
  return node ? node.mapped() : otherwise;
}

FileIdentity identity_of(const std::string& path) {
  const UniqueFd fd = open_file(path);  // whoever opens a file of a server is told what it is now
  struct stat st{};
  if (::fstat(fd.get(), &st) != 0) throw_errno(path);
  return {st.st_size, st.st_dev, st.st_ino, int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec};
}

std::string describe(const Fault& fault) {
  const std::string error = fault.error == 0 ? "" : std::string(":") + ::strerrorname_np(fault.error);
  switch (fault.kind) {
    case FaultKind::kNone:
      return "landed";
    case FaultKind::kOpen:
      return "open" + error;
    case FaultKind::kChanged:
      return "changed";
    case FaultKind::kEndOfFile:
      return "end_of_file";
    case FaultKind::kRead:
      return "read" + error;
    case FaultKind::kTimeout:
      return "timeout";
    case FaultKind::kDevice:
      return "device";
    case FaultKind::kUnavailable:
      return "unavailable";
    case FaultKind::kCancelled:
      return "cancelled";
  }
  return "?";
}

bool is_one_of(std::string_view value, std::string_view alternatives) {
  while (!alternatives.empty()) {
    const size_t end = std::min(alternatives.find('|'), alternatives.size());
    if (value == alternatives.substr(0, end)) return true;
    alternatives.remove_prefix(std::min(end + 1, alternatives.size()));
  }
  return false;
}

// Ends the process at once: the Pipeline may wait for storage that never answers.
[[noreturn]] void report(bool right, const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
  ::_exit(right ? 0 : 1);
}

void require(bool condition, const std::string& otherwise) {
  if (!condition) report(false, otherwise);
}

// Storage has answered nothing: the Pipeline must say that reads are in flight, and, when answers come, that none is
// any more; meanwhile nothing is written but where it said.
std::string judge_silence(Pipeline& pipeline, const Destinations& destinations, const std::string& then) {
  require(!pipeline.stop(500ms), "timeout, but no read is in flight");
  const std::optional<std::vector<ByteRange>> in_flight = pipeline.destinations_in_flight();
  const std::vector<std::byte> before = destinations.copy();
  if (then.empty()) return "memory kept";
  run_command(then);
  require(pipeline.stop(100s), "storage answers again, but reads are still in flight");
  require(!in_flight || destinations.changed_only_in(*in_flight, before), "written to memory that was given back");
  return "memory kept until answered";
}

// Where it landed: whether it was read as demanded.
std::string judge_landed(const std::string& path, const Pipeline& pipeline, const std::string& strategy, bool cached,
                         bool leave) {
  const PipelineStats stats = pipeline.stats();
  const FileStats& file = stats.files.at(0);
  const DirectIo direct = pipeline.direct_io(0);
  const UniqueFd fd = open_file(path);
  const Residency residency(fd.get());
  const int64_t resident = residency.resident_bytes(0, kFileBytes);
  if (strategy == "direct" || (strategy == "auto" && direct.usable && !cached)) {
    require(file.direct_bytes > 0 && file.buffered_bytes == 0,
            "read through the page cache: " + std::to_string(file.buffered_bytes) + " bytes");
    require(cached || !direct.proven || resident <= 0, "direct, but now in the page cache");
    require(direct.memory_alignment > 4 || stats.in_place_bytes > 0, "nothing was read in place");
  } else {
    require(file.buffered_bytes > 0 && file.direct_bytes == 0, "read past the page cache");
    require(!cached || file.cached_bytes > 0, "was in the page cache, and was not expected to be");
    require(!leave || resident <= 0, "left in the page cache: " + std::to_string(resident) + " bytes");
  }
  return stats.in_place_bytes > 0 ? "in place " + std::to_string(stats.in_place_bytes / kMiB) + " MiB" : "staged";
}

int load(const std::string& path, Options options) {
  const std::string reader = take(options, "reader", "io_uring");
  const std::string strategy = take(options, "strategy", "auto");
  const std::string expect = take(options, "expect", "landed");
  const std::string then = take(options, "then", "");
  const std::string registered = take(options, "registered", "");
  const bool leave = take(options, "page_cache", "keep") == "leave";
  const bool cached = take(options, "cached", "no") == "yes";
  auto observer = std::make_shared<Observer>();
  observer->during = take(options, "during", "");

  PipelineOptions pipeline_options;
  pipeline_options.strategy = strategy == "direct"     ? Strategy::kDirect
                              : strategy == "buffered" ? Strategy::kBuffered
                                                       : Strategy::kAuto;
  pipeline_options.page_cache = leave ? PageCache::kLeave : PageCache::kKeep;
  pipeline_options.chunk_bytes = kChunk;
  pipeline_options.staging_bytes = 2 * kQueueDepth * kChunk;
  pipeline_options.merge_gap_bytes = 16 * kKiB;
  pipeline_options.io_timeout = std::chrono::milliseconds(std::stoll(take(options, "timeout_ms", "0")));
  const Backend backend = reader == "io_uring" ? Backend::kUring : Backend::kPread;
  pipeline_options.make_reader = [=](bool direct, std::string* fallback) {
    return std::make_unique<ObservedReader>(make_reader({backend, kQueueDepth, 1}, direct, fallback), observer);
  };
  if (!options.empty()) throw std::runtime_error("no such option: " + options.begin()->first);

  const FileIdentity identity = identity_of(path);
  (cached ? make_warm : make_cold)(path, kFileBytes);
  const Destinations destinations;
  Pipeline pipeline(std::move(pipeline_options));
  pipeline.add_file(path, identity);
  const int64_t segment = pipeline.submit(destinations.transfers(), Pipeline::Order::kAppend);
  require(pipeline.wait(segment, 200s), "neither landed nor failed");
  const Fault fault = pipeline.fault();
  const std::string end = describe(fault);
  std::string text = end;
  if (!fault.detail.empty()) text += " (" + fault.detail + ")";
  if (fault.kind == FaultKind::kNone) {
    if (const std::string wrong = destinations.wrong(); !wrong.empty())
      report(false, "landed with wrong bytes: " + wrong);
  }
  require(is_one_of(end, expect), text + ", expected " + expect);
  require(observer->during.empty() || observer->done, text + " before anything happened to it");
  switch (fault.kind) {
    case FaultKind::kNone:
      text = judge_landed(path, pipeline, strategy, cached, leave);
      break;
    case FaultKind::kTimeout:
      text += ", " + judge_silence(pipeline, destinations, then);
      break;
    case FaultKind::kRead:
    case FaultKind::kEndOfFile:
      require(fault.file == 0 && fault.offset >= 0 && fault.transfer_id >= 0, text + " does not say where");
      if (fault.kind == FaultKind::kEndOfFile) {
        require(fault.offset == identity_of(path).size, text + " at " + std::to_string(fault.offset) + ", not the end");
      } else if (fault.error == EIO) {
        require(fault.transfer_id == 0 && fault.offset <= kFaultOffset && kFaultOffset < fault.offset + kChunk,
                text + " at " + std::to_string(fault.offset) + ", not where the bad block is");
      }
      text += " at " + std::to_string(fault.offset) + " in tensor " + std::to_string(fault.transfer_id);
      [[fallthrough]];
    default:
      require(pipeline.stop(100s), text + ", but reads stay in flight");
  }
  require(registered != "yes" || (observer->num_registered > 0 && observer->num_refused == 0),
          "staging buffers are not registered");
  require(registered != "no" || observer->num_registered == 0, "staging buffers are registered, against the limit");
  if (observer->num_registered > 0) text += ", registered buffers";
  report(true, text);
}

int make(const std::string& path) {
  std::vector<std::byte> bytes(kFileBytes);
  for (int64_t i = 0; i < kFileBytes; ++i) bytes[static_cast<size_t>(i)] = byte_of_file(i);
  const UniqueFd fd = open_file(path, O_WRONLY | O_CREAT | O_TRUNC);
  for (int64_t done = 0; done < kFileBytes;) {
    const ssize_t n = ::write(fd.get(), bytes.data() + done, static_cast<size_t>(kFileBytes - done));
    if (n < 0) throw_errno(path);
    done += n;
  }
  if (::fsync(fd.get()) != 0) throw_errno(path);
  return 0;
}

int where(const std::string& path) {
  const UniqueFd fd = open_file(path);
  alignas(fiemap) std::byte memory[sizeof(fiemap) + sizeof(fiemap_extent)] = {};
  auto* map = new (memory) fiemap{};
  map->fm_start = kFaultOffset;
  map->fm_length = 1;
  map->fm_extent_count = 1;
  if (::ioctl(fd.get(), FS_IOC_FIEMAP, map) != 0) throw_errno(path);
  if (map->fm_mapped_extents != 1) throw std::runtime_error(path + ": no extent at the offset");
  const fiemap_extent& extent = map->fm_extents[0];
  std::printf("%llu\n", extent.fe_physical + (kFaultOffset - extent.fe_logical));
  return 0;
}

int probe(const std::string& path) {
  make_cold(path, kFileBytes);
  const DirectIo direct = probe_direct(path.c_str());
  const UniqueFd fd = open_file(path);
  const Residency residency(fd.get());
  constexpr int kRwfDontCache = 0x80;
  std::byte byte;
  const iovec memory = {.iov_base = &byte, .iov_len = 1};
  const bool dontcache = ::preadv2(fd.get(), &memory, 1, 0, kRwfDontCache) >= 0;
  std::string text = direct.usable ? (direct.proven ? "direct" : direct.reason) : "no direct: " + direct.reason;
  if (direct.usable) {
    text +=
        ", memory " + std::to_string(direct.memory_alignment) + ", offset " + std::to_string(direct.offset_alignment);
  }
  text += ", residency by " + std::string(residency.method()) + (dontcache ? ", RWF_DONTCACHE" : ", no RWF_DONTCACHE");
  std::printf("%s\n", text.c_str());
  return 0;
}

int measure(const std::string& path, Options options) {
  const std::string reader = take(options, "reader", "");
  MeasureOptions measured;
  measured.reader = reader == "io_uring" ? MeasuredReader::kUring
                    : reader == "pread"  ? MeasuredReader::kPread
                                         : MeasuredReader::kReference;
  measured.direct = take(options, "strategy", "") == "direct";
  measured.chunk_bytes = kChunk;
  measured.queue_depth = kQueueDepth;
  make_cold(path, kFileBytes);
  const ReadFigures figures = measure_reads(path, measured);
  require(figures.bytes == kFileBytes, std::to_string(figures.bytes) + " bytes read");
  require(figures.registered_buffers == (reader == "io_uring"), "staging buffers are not registered");
  report(true, std::to_string(figures.latencies.size()) + " reads");
}

int run(int argc, char** argv) {
  const std::string command = argc >= 3 ? argv[1] : "";
  const std::string path = argc >= 3 ? argv[2] : "";
  if (command == "make") return make(path);
  if (command == "where") return where(path);
  if (command == "probe") return probe(path);
  if (command != "load" && command != "measure") {
    throw std::runtime_error("usage: load_file make|where|probe|load|measure PATH [option=value ...]");
  }
  Options options;
  for (int i = 3; i < argc; ++i) {
    const std::string option = argv[i];
    const size_t equals = option.find('=');
    if (equals == std::string::npos) throw std::runtime_error("not option=value: " + option);
    options[option.substr(0, equals)] = option.substr(equals + 1);
  }
  return command == "load" ? load(path, std::move(options)) : measure(path, std::move(options));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 2;
  }
}

#include "measure/measure_reads.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "readers/pread_reader.h"
#include "readers/probe.h"
#include "readers/reader.h"
#include "readers/residency.h"
#include "readers/uring_reader.h"
#include "staging/pages.h"
#include "util/align.h"
#include "util/threads.h"
#include "util/unique_fd.h"

namespace weightlift {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr int64_t kWarmingBytes = int64_t{4} << 20;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

[[noreturn]] void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

UniqueFd open_file(const std::string& path, int flags) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags));
  if (!fd) throw_errno(errno, path);
  return fd;
}

int64_t file_bytes(int fd, const std::string& path) {
  struct stat st{};
  if (::fstat(fd, &st) != 0) throw_errno(errno, path);
  if (!S_ISREG(st.st_mode)) throw std::runtime_error(path + ": not a regular file");
  return st.st_size;
}

// One buffer for each read in flight, side by side.
class Buffers {
 public:
  Buffers(int64_t chunk_bytes, int count, bool huge_pages) : chunk_bytes_(chunk_bytes), mapping_(chunk_bytes * count) {
    const auto size = static_cast<size_t>(chunk_bytes * count);
    if (!huge_pages) ::madvise(mapping_.data(), size, MADV_NOHUGEPAGE);
    for (size_t at = 0; at < size; at += kPage) mapping_.data()[at] = std::byte{1};
  }
  std::byte* operator[](int index) const { return mapping_.data() + index * chunk_bytes_; }

 private:
  int64_t chunk_bytes_;
  HugeMapping mapping_;
};

// What is left to be read, handed out piece by piece.
class Offsets {
 public:
  Offsets(const MeasureOptions& options, int64_t size)
      : chunk_bytes_(options.chunk_bytes),
        end_(std::min(size, options.max_bytes)),
        count_((end_ + chunk_bytes_ - 1) / chunk_bytes_),
        step_(options.random ? far_step(count_) : 1),
        seconds_(options.max_seconds) {}

  // The next read's offset; -1: no more.
  int64_t next() {
    const int64_t number = next_.fetch_add(1, std::memory_order_relaxed);  // pairs with nothing: a count
    if (number >= count_ || seconds_since(start_) >= seconds_) return -1;
    return number * step_ % count_ * chunk_bytes_;
  }
  // In whole pages, as direct reads need it: the last one may reach past the end of the file.
  int64_t length(int64_t offset) const { return std::min(chunk_bytes_, align_up(end_ - offset, kPage)); }

 private:
  // Multiples of it modulo count meet each number once, and consecutive ones lie far apart: about the golden section.
  static int64_t far_step(int64_t count) {
    auto step = static_cast<int64_t>(0.618 * static_cast<double>(count)) + 1;
    while (std::gcd(step, count) > 1) ++step;
    return step;
  }

  const int64_t chunk_bytes_;
  const int64_t end_;
  const int64_t count_;
  const int64_t step_;
  const double seconds_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> next_{0};
};

std::unique_ptr<Reader> make_measured_reader(const MeasureOptions& options) {
  if (options.reader == MeasuredReader::kPread) return make_pread_reader({options.queue_depth, options.queue_depth});
  std::string refusal;
  auto reader = make_uring_reader({.queue_depth = options.queue_depth}, &refusal);
  if (!reader) throw std::runtime_error(refusal);
  return reader;
}

void read_by(Reader& reader, int fd, const Buffers& buffers, const MeasureOptions& options, int64_t size,
             ReadFigures* figures, const std::string& path) {
  std::vector<int> buffer_index(static_cast<size_t>(options.queue_depth), -1);
  for (int i = 0; i < options.queue_depth; ++i) {
    auto& index = buffer_index[static_cast<size_t>(i)];
    index = reader.register_buffer(buffers[i], static_cast<size_t>(options.chunk_bytes));
    figures->registered_buffers = index >= 0;
    if (index < 0) break;
  }
  const int file_index = reader.register_file(fd);

  std::vector<Clock::time_point> submitted(static_cast<size_t>(options.queue_depth));
  std::vector<ReadRequest> requests;
  std::vector<ReadCompletion> completions(static_cast<size_t>(options.queue_depth));
  std::vector<int> free;
  for (int i = options.queue_depth - 1; i >= 0; --i) free.push_back(i);

  const double cpu_before = cpu_seconds();
  const auto start = Clock::now();
  Offsets offsets(options, size);
  int in_flight = 0;
  int error = 0;
  for (bool more = true;;) {
    requests.clear();
    while (more && !free.empty()) {
      const int64_t offset = offsets.next();
      more = offset >= 0;
      if (!more) break;
      const auto slot = static_cast<size_t>(free.back());
      free.pop_back();
      submitted[slot] = Clock::now();
      requests.push_back({.fd = fd,
                          .file_index = file_index,
                          .buffer_index = buffer_index[slot],
                          .buffer = buffers[static_cast<int>(slot)],
                          .offset = offset,
                          .length = offsets.length(offset),
                          .token = slot});
    }
    if (!requests.empty()) {
      if (const int result = reader.submit(requests); result < 0) throw_errno(-result, path);
      in_flight += static_cast<int>(requests.size());
    }
    if (in_flight == 0) break;
    const int count = reader.wait(completions, std::chrono::milliseconds(1000));
    if (count < 0) throw_errno(-count, path);
    for (const ReadCompletion& completion : std::span(completions).first(static_cast<size_t>(count))) {
      free.push_back(static_cast<int>(completion.token));
      --in_flight;
      if (completion.result < 0) {
        error = static_cast<int>(-completion.result);
        more = false;
      } else {
        figures->bytes += completion.result;
        figures->latencies.push_back(seconds_since(submitted[completion.token]));
      }
    }
  }
  figures->seconds = seconds_since(start);
  figures->cpu_seconds = cpu_seconds() - cpu_before;
  if (error != 0) throw_errno(error, path);
}

void read_plainly(int fd, const Buffers& buffers, const MeasureOptions& options, int64_t size, ReadFigures* figures,
                  const std::string& path) {
  std::mutex mutex;
  int error = 0;
  const double cpu_before = cpu_seconds();
  const auto start = Clock::now();
  Offsets offsets(options, size);
  const auto work = [&](int thread) {
    int64_t bytes = 0;
    int failed = 0;
    std::vector<double> latencies;
    for (int64_t offset = offsets.next(); offset >= 0 && failed == 0; offset = offsets.next()) {
      const auto submitted = Clock::now();
      const ssize_t n = ::pread(fd, buffers[thread], static_cast<size_t>(offsets.length(offset)), offset);
      if (n < 0) {
        failed = errno;
      } else {
        bytes += n;
        latencies.push_back(seconds_since(submitted));
      }
    }
    const std::lock_guard lock(mutex);
    figures->bytes += bytes;
    figures->latencies.insert(figures->latencies.end(), latencies.begin(), latencies.end());
    if (failed != 0) error = failed;
  };
  {
    std::vector<std::jthread> threads;
    const SignalsBlocked blocked;
    for (int i = 0; i < options.queue_depth; ++i) threads.emplace_back(work, i);
  }
  figures->seconds = seconds_since(start);
  figures->cpu_seconds = cpu_seconds() - cpu_before;
  if (error != 0) throw_errno(error, path);
}

}  // namespace

double ReadFigures::latency(double fraction) const {
  if (latencies.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(fraction * static_cast<double>(latencies.size())));
  return latencies[std::max<size_t>(rank, 1) - 1];
}

ReadFigures measure_reads(const std::string& path, const MeasureOptions& options) {
  if (options.chunk_bytes <= 0 || !is_aligned(options.chunk_bytes, kPage) || options.chunk_bytes > kMaxReadBytes) {
    throw std::invalid_argument("chunk_bytes must be a multiple of 4096, at most 1 GiB");
  }
  if (options.queue_depth < 1 || options.queue_depth > kMaxUringQueueDepth) {
    throw std::invalid_argument("queue_depth must be 1 to 4096");
  }
  if (options.direct) {
    if (const DirectIo direct_io = probe_direct(path.c_str()); !direct_io.usable) {
      throw std::runtime_error(path + ": no direct I/O: " + direct_io.reason);
    }
  }
  const UniqueFd fd = open_file(path, options.direct ? O_DIRECT : 0);
  const int64_t size = file_bytes(fd.get(), path);
  const Buffers buffers(options.chunk_bytes, options.queue_depth, options.huge_pages);
  ReadFigures figures;
  if (options.reader == MeasuredReader::kReference) {
    read_plainly(fd.get(), buffers, options, size, &figures, path);
  } else {
    const auto reader = make_measured_reader(options);
    read_by(*reader, fd.get(), buffers, options, size, &figures, path);
  }
  std::ranges::sort(figures.latencies);
  return figures;
}

int64_t make_cold(const std::string& path, int64_t bytes) {
  const UniqueFd fd = open_file(path, 0);
  const Residency residency(fd.get());
  ::fdatasync(fd.get());  // what can't be written back stays, and is counted
  ::posix_fadvise(fd.get(), 0, align_up(bytes, kPage), POSIX_FADV_DONTNEED);  // a part of a page would stay
  const int64_t left = residency.resident_bytes(0, bytes);
  if (left == 0) return 0;
  const UniqueFd drop(::open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC));
  if (!drop || ::write(drop.get(), "1\n", 2) != 2) return left;
  return residency.resident_bytes(0, bytes);
}

int64_t make_warm(const std::string& path, int64_t bytes) {
  const UniqueFd fd = open_file(path, 0);
  std::vector<std::byte> buffer(kWarmingBytes);
  for (int64_t offset = 0; offset < bytes;) {
    const auto length = static_cast<size_t>(std::min(kWarmingBytes, bytes - offset));
    const ssize_t n = ::pread(fd.get(), buffer.data(), length, offset);
    if (n < 0) throw_errno(errno, path);
    if (n == 0) break;
    offset += n;
  }
  return Residency(fd.get()).resident_bytes(0, bytes);
}

}  // namespace weightlift

// Readers, destinations and copies alone, on any storage. Options of its own, before Google Benchmark's:
//
//   bench_storage --path=/mnt/nvme         a folder, in which a file is written and removed again; or a file
//                 --mib=1024               how much of it is read
//   bench_storage --path=/mnt/nvme --benchmark_filter='^read/io_uring/direct' --benchmark_repetitions=3
//
// Names:
//   read/READER/direct|buffered/cold|warm/huge|small/CHUNK_KiB/DEPTH  one pass over the file, into reused buffers on
//                                                                     huge or small pages; READER is io_uring, pread or
//                                                                     reference, whose depth is its number of threads
//   load/in_place|staged/huge|small|touched/cold|warm                 the whole pipeline into fresh memory, or into
//   such
//                                                                     that was touched before
//   copy/...                                                          what copy_elements makes of 256 MiB in memory, on
//                                                                     one thread, beside memcpy; source bytes
//
// Counters: latencies in milliseconds, cpu_s_per_GB, cached (fraction of the file in the page cache before). A reading
// that was to be cold or warm and was not is an error, not a figure.

#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "measure/measure_reads.h"
#include "plan/transfer.h"
#include "readers/make_reader.h"
#include "readers/probe.h"
#include "staging/pages.h"
#include "staging/pipeline.h"
#include "transform/copy.h"
#include "util/unique_fd.h"

namespace {

using namespace weightlift;
namespace fs = std::filesystem;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kCopyBytes = 256 * kMiB;
constexpr int64_t kMaxBufferBytes = 256 * kMiB;

// The file that is read: what was there, or one of random bytes while this lives.
class File {
 public:
  File(const std::string& path, int64_t bytes) : path_(path), bytes_(bytes) {
    if (!fs::is_directory(path)) {
      bytes_ = std::min(bytes, static_cast<int64_t>(fs::file_size(path)));
      return;
    }
    path_ = path + "/.weightlift-bench-XXXXXX";
    const UniqueFd fd(::mkstemp(path_.data()));
    if (!fd) throw std::system_error(errno, std::generic_category(), path);
    is_ours_ = true;
    std::mt19937_64 random(1);
    std::vector<uint64_t> words(static_cast<size_t>(kMiB) / sizeof(uint64_t));
    for (int64_t written = 0; written < bytes_;) {
      for (uint64_t& word : words) word = random();
      const ssize_t n = ::write(fd.get(), words.data(), static_cast<size_t>(std::min(kMiB, bytes_ - written)));
      if (n < 0) {
        const int error = errno;
        ::unlink(path_.c_str());
        throw std::system_error(error, std::generic_category(), path_);
      }
      written += n;
    }
    ::fsync(fd.get());
  }
  ~File() {
    if (is_ours_) ::unlink(path_.c_str());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }

  FileIdentity identity() const {
    struct stat st{};
    if (::stat(path_.c_str(), &st) != 0) throw std::system_error(errno, std::generic_category(), path_);
    return {st.st_size, st.st_dev, st.st_ino, int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec};
  }

  // Brings the file into the state, and says what is wrong where that did not work.
  std::string prepare(bool cold, benchmark::State& state) const {
    const int64_t cached = cold ? make_cold(path_, bytes_) : make_warm(path_, bytes_);
    if (cached < 0) return "what the page cache holds can't be told here";
    const double fraction = static_cast<double>(cached) / static_cast<double>(bytes_);
    state.counters["cached"] = fraction;
    if (cold ? fraction <= 0.01 : fraction >= 0.99) return {};
    return std::to_string(static_cast<int>(100 * fraction)) + " % of the file are in the page cache";
  }

 private:
  std::string path_;
  int64_t bytes_;
  bool is_ours_ = false;
};

// Anonymous memory, aligned to huge pages.
class Memory {
 public:
  enum class Pages { kHuge, kSmall };
  Memory(int64_t bytes, Pages pages, bool touched) : mapping_(bytes) {
    const auto size = static_cast<size_t>(bytes);
    if (pages == Pages::kSmall) ::madvise(mapping_.data(), size, MADV_NOHUGEPAGE);
    if (touched) std::memset(mapping_.data(), 1, size);
  }
  std::byte* data() const { return mapping_.data(); }

 private:
  HugeMapping mapping_;
};

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

void report(benchmark::State& state, int64_t bytes, double cpu) {
  state.SetBytesProcessed(bytes);
  state.counters["cpu_s_per_GB"] = 1e9 * cpu / static_cast<double>(bytes);
}

void read(benchmark::State& state, const File& file, const MeasureOptions& options, bool cold) {
  try {
    for (auto _ : state) {
      if (const std::string problem = file.prepare(cold, state); !problem.empty()) {
        state.SkipWithError(problem.c_str());
        return;
      }
      const ReadFigures figures = measure_reads(file.path(), options);
      state.SetIterationTime(figures.seconds);
      for (const auto& [name, fraction] :
           {std::pair{"p50_ms", 0.5}, {"p90_ms", 0.9}, {"p99_ms", 0.99}, {"max_ms", 1}}) {
        state.counters[name] = 1e3 * figures.latency(fraction);
      }
      report(state, figures.bytes, figures.cpu_seconds);
    }
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

struct LoadOptions {
  bool in_place;
  Memory::Pages pages;
  bool touched;
  bool cold;
};

void load(benchmark::State& state, const File& file, const LoadOptions& how) {
  try {
    for (auto _ : state) {
      const Memory destination(file.bytes(), how.pages, how.touched);
      if (const std::string problem = file.prepare(how.cold, state); !problem.empty()) {
        state.SkipWithError(problem.c_str());
        return;
      }
      PipelineOptions options;
      options.strategy = how.cold ? Strategy::kDirect : Strategy::kBuffered;
      options.chunk_bytes = 2 * kMiB;
      options.staging_bytes = kMaxBufferBytes;
      options.num_workers = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
      options.advise_hugepages = how.in_place && how.pages == Memory::Pages::kHuge;
      options.make_reader = [&](bool direct, std::string* fallback) {
        return make_reader({.queue_depth = 16, .num_threads = options.num_workers}, direct, fallback);
      };
      const double cpu = cpu_seconds();
      const auto start = std::chrono::steady_clock::now();
      Pipeline pipeline(options);
      const int32_t index = pipeline.add_file(file.path(), file.identity());
      const int64_t segment = pipeline.submit({make_transfer(0, index, ElementType::kBytes1, 0, ElementType::kBytes1,
                                                             destination.data(), {{file.bytes(), 1, 1}})},
                                              Pipeline::Order::kAppend);
      while (!pipeline.wait(segment, std::chrono::seconds(1))) {
      }
      state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      if (const Fault fault = pipeline.fault()) {
        state.SkipWithError(fault.detail.empty() ? std::strerror(fault.error) : fault.detail.c_str());
        return;
      }
      report(state, file.bytes(), cpu_seconds() - cpu);
      state.counters["in_place"] =
          static_cast<double>(pipeline.stats().in_place_bytes) / static_cast<double>(file.bytes());
    }
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

const Memory& copy_source() {
  static const Memory memory(kCopyBytes, Memory::Pages::kHuge, true);
  return memory;
}
const Memory& copy_target() {
  static const Memory memory(2 * kCopyBytes, Memory::Pages::kHuge, true);
  return memory;
}

void copy_by_memcpy(benchmark::State& state) {
  copy_source();
  copy_target();
  for (auto _ : state) std::memcpy(copy_target().data(), copy_source().data(), static_cast<size_t>(kCopyBytes));
  state.SetBytesProcessed(state.iterations() * kCopyBytes);
}

void copy(benchmark::State& state, ElementType src, ElementType dst, const std::vector<Dim>& dims) {
  copy_source();
  const Transfer transfer = make_transfer(0, 0, src, 0, dst, copy_target().data(), dims);
  const int64_t count = transfer.num_elements();
  for (auto _ : state) copy_elements(transfer, 0, count, copy_source().data(), 0);
  state.SetBytesProcessed(state.iterations() * count * element_bytes(transfer.src_type));
}

void register_reads(const File& file) {
  struct Way {
    MeasuredReader reader;
    const char* name;
    bool direct;
  };
  using enum MeasuredReader;
  const Way ways[] = {{kUring, "io_uring", true}, {kPread, "pread", true},         {kUring, "io_uring", false},
                      {kPread, "pread", false},   {kReference, "reference", true}, {kReference, "reference", false}};
  for (const auto& [reader, name, direct] : ways) {
    for (const bool cold : {true, false}) {
      if (direct && !cold) continue;  // reads past the page cache
      for (const bool huge : {true, false}) {
        for (const int64_t chunk : {128 * kKiB, 512 * kKiB, kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB}) {
          for (const int depth : {1, 2, 4, 8, 16, 32, 64, 128}) {
            // Threads beyond 16 tell nothing new.
            if (chunk * depth > kMaxBufferBytes || (reader != kUring && depth > 16)) continue;
            const std::string full_name = std::string("read/") + name + (direct ? "/direct" : "/buffered") +
                                          (cold ? "/cold" : "/warm") + (huge ? "/huge/" : "/small/") +
                                          std::to_string(chunk / kKiB) + "/" + std::to_string(depth);
            const MeasureOptions options{.reader = reader,
                                         .direct = direct,
                                         .chunk_bytes = chunk,
                                         .queue_depth = depth,
                                         .huge_pages = huge,
                                         .max_bytes = file.bytes()};
            benchmark::RegisterBenchmark(
                full_name.c_str(),
                [&file, options, cold](benchmark::State& state) { read(state, file, options, cold); })
                ->Iterations(1)
                ->UseManualTime()
                ->Unit(benchmark::kMillisecond);
          }
        }
      }
    }
  }
}

void register_loads(const File& file) {
  using enum Memory::Pages;
  const std::pair<const char*, LoadOptions> loads[] = {
      {"load/in_place/huge/cold", {true, kHuge, false, true}},
      {"load/staged/huge/cold", {false, kHuge, false, true}},
      {"load/staged/small/cold", {false, kSmall, false, true}},
      {"load/staged/touched/cold", {false, kHuge, true, true}},
      {"load/in_place/huge/warm", {true, kHuge, false, false}},
      {"load/in_place/small/warm", {true, kSmall, false, false}},
      {"load/in_place/touched/warm", {true, kHuge, true, false}},
  };
  for (const auto& [name, options] : loads) {
    benchmark::RegisterBenchmark(name,
                                 [&file, options = options](benchmark::State& state) { load(state, file, options); })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
}

void register_copies() {
  using enum ElementType;
  const auto add = [](const char* name, ElementType src, ElementType dst, std::vector<Dim> dims) {
    benchmark::RegisterBenchmark(name, [=](benchmark::State& state) {
      copy(state, src, dst, dims);
    })->Unit(benchmark::kMillisecond);
  };
  benchmark::RegisterBenchmark("copy/memcpy", copy_by_memcpy)->Unit(benchmark::kMillisecond);
  constexpr int64_t kRows = 8192;
  constexpr int64_t kRowBytes = kCopyBytes / kRows;  // 32 KiB, 16384 elements of two bytes
  add("copy/contiguous", kBytes2, kBytes2, {{kCopyBytes / 2, 2, 2}});
  add("copy/half_of_each_row", kBytes2, kBytes2, {{kRows, kRowBytes, kRowBytes / 2}, {kRowBytes / 4, 2, 2}});
  add("copy/256_bytes_of_each_row", kBytes2, kBytes2, {{kRows, kRowBytes, 256}, {128, 2, 2}});
  add("copy/every_other_element", kBytes2, kBytes2, {{kCopyBytes / 4, 4, 2}});
  add("copy/transposed", kBytes2, kBytes2, {{kRows, kRowBytes, 2}, {kRowBytes / 2, 2, 2 * kRows}});
  add("copy/bfloat16_to_float32", kBFloat16, kFloat32, {{kCopyBytes / 2, 2, 4}});
  add("copy/bfloat16_to_float16", kBFloat16, kFloat16, {{kCopyBytes / 2, 2, 2}});
  add("copy/float16_to_float32", kFloat16, kFloat32, {{kCopyBytes / 2, 2, 4}});
  add("copy/float16_to_bfloat16", kFloat16, kBFloat16, {{kCopyBytes / 2, 2, 2}});
  add("copy/float32_to_bfloat16", kFloat32, kBFloat16, {{kCopyBytes / 4, 4, 2}});
  add("copy/float32_to_float16", kFloat32, kFloat16, {{kCopyBytes / 4, 4, 2}});
}

// Takes --name=value out of the arguments.
std::string take_flag(std::vector<char*>& arguments, std::string_view name, std::string value) {
  std::erase_if(arguments, [&](std::string_view argument) {
    if (!argument.starts_with(name)) return false;
    value = argument.substr(name.size());
    return true;
  });
  return value;
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<char*> arguments(argv, argv + argc);
  const std::string path = take_flag(arguments, "--path=", ".");
  const int64_t bytes = std::stoll(take_flag(arguments, "--mib=", "1024")) * kMiB;
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;

  const File file(path, bytes);
  const DirectIo direct_io = probe_direct(file.path().c_str());
  utsname system{};
  ::uname(&system);
  benchmark::AddCustomContext("kernel", system.release);
  benchmark::AddCustomContext("path", path);
  benchmark::AddCustomContext("file_bytes", std::to_string(file.bytes()));
  benchmark::AddCustomContext("direct_io", direct_io.usable
                                               ? "offset alignment " + std::to_string(direct_io.offset_alignment) +
                                                     (direct_io.proven ? "" : ", unproven")
                                               : direct_io.reason);
  register_reads(file);
  register_loads(file);
  register_copies();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_storage: %s\n", error.what());
  return 1;
}

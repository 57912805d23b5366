#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "faulty_reader.h"
#include "readers/pread_reader.h"
#include "readers/probe.h"
#include "readers/residency.h"
#include "readers/uring_reader.h"
#include "util/align.h"
#include "util/unique_fd.h"

using namespace weightlift;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

// Byte number i of every test file.
std::byte expected_byte(int64_t i) { return static_cast<std::byte>((i * 2654435761u >> 11) ^ (i >> 20)); }

bool holds_file_bytes(const std::byte* data, int64_t offset, int64_t length) {
  for (int64_t i = 0; i < length; ++i) {
    if (data[i] != expected_byte(offset + i)) return false;
  }
  return true;
}

// A file of `size` bytes, written back, gone at the end of the scope.
class TestFile {
 public:
  explicit TestFile(int64_t size, const fs::path& folder = fs::temp_directory_path()) {
    path_ = (folder / "weightlift-XXXXXX").string();
    fd_ = UniqueFd(::mkstemp(path_.data()));
    REQUIRE(fd_);
    std::vector<std::byte> bytes(size);
    for (int64_t i = 0; i < size; ++i) bytes[i] = expected_byte(i);
    REQUIRE(::write(fd_.get(), bytes.data(), size) == size);
    REQUIRE(::fsync(fd_.get()) == 0);
    REQUIRE(::fchmod(fd_.get(), 0644) == 0);
  }
  ~TestFile() { ::unlink(path_.c_str()); }

  const char* path() const { return path_.c_str(); }
  int fd() const { return fd_.get(); }
  void drop_from_cache() const { REQUIRE(::posix_fadvise(fd(), 0, 0, POSIX_FADV_DONTNEED) == 0); }

 private:
  std::string path_;
  UniqueFd fd_;
};

struct FreeMapping {
  size_t size;
  void operator()(std::byte* data) const { ::munmap(data, size); }
};
using Mapping = std::unique_ptr<std::byte[], FreeMapping>;

Mapping map_pages(size_t size) {
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(data != MAP_FAILED);
  return Mapping(static_cast<std::byte*>(data), FreeMapping{size});
}

int count_entries(const char* folder) {
  return static_cast<int>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}
int count_threads() { return count_entries("/proc/self/task"); }

// Threads of the kernel, which serve a ring, end a little after it.
bool becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 200; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

// Waits until `count` reads have completed; results by token.
std::map<uint64_t, int64_t> take(Reader& reader, size_t count) {
  std::map<uint64_t, int64_t> results;
  std::vector<ReadCompletion> completions(4);
  for (int waits = 0; results.size() < count; ++waits) {
    REQUIRE(waits < 1000);
    const int n = reader.wait(completions, 1000ms);
    REQUIRE(n >= 0);
    for (int i = 0; i < n; ++i) REQUIRE(results.emplace(completions[i].token, completions[i].result).second);
  }
  return results;
}

int64_t read_one(Reader& reader, const ReadRequest& request) {
  REQUIRE(reader.submit({&request, 1}) == 0);
  return take(reader, 1).at(request.token);
}

std::unique_ptr<Reader> make_uring(int queue_depth = 8) {
  std::string refusal;
  auto reader = make_uring_reader({.queue_depth = queue_depth}, &refusal);
  if (reader == nullptr) MESSAGE("skipped, no io_uring here: ", refusal);
  return reader;
}

// Runs a test on each reader that this machine has, in one doctest subcase each.
void with_every_reader(const std::function<void(Reader&)>& test) {
  SUBCASE("pread") { test(*make_pread_reader({8, 8})); }
  SUBCASE("io_uring") {
    if (auto reader = make_uring()) test(*reader);
  }
}

// Runs `body` in a child process; what it returns becomes the exit status.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) ::_exit(body());
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

// Gives up root's privileges, in a child process. An ordinary user's process stays as it is.
void become_nobody() {
  constexpr unsigned kNobody = 65534;
  if (::geteuid() != 0) return;
  if (::setgroups(0, nullptr) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) ::_exit(99);
}

// From now on one system call of this process fails with `error`.
void forbid_system_call(unsigned number, unsigned error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = 4, .filter = code};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) ::_exit(98);
  if (::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0) ::_exit(98);
}

constexpr int64_t kFileSize = 1'000'003;

}  // namespace

TEST_CASE("reads at odd offsets and lengths give the bytes of the file") {
  with_every_reader([](Reader& reader) {
    const TestFile file(kFileSize);
    std::mt19937_64 random(7);
    for (int round = 0; round < 50; ++round) {
      std::vector<ReadRequest> requests(reader.queue_depth());
      std::vector<std::vector<std::byte>> buffers;
      for (size_t i = 0; i < requests.size(); ++i) {
        const auto length = static_cast<int64_t>(1 + random() % 100'000);
        const auto offset = static_cast<int64_t>(random() % (kFileSize - length));
        buffers.emplace_back(length + 1, std::byte{0x5A});
        requests[i] = {.fd = file.fd(), .buffer = buffers[i].data(), .offset = offset, .length = length, .token = i};
      }
      REQUIRE(reader.submit(requests) == 0);
      const auto results = take(reader, requests.size());
      for (size_t i = 0; i < requests.size(); ++i) {
        REQUIRE(results.at(i) == requests[i].length);  // buffered reads of a local file are whole
        REQUIRE(holds_file_bytes(requests[i].buffer, requests[i].offset, requests[i].length));
        REQUIRE(buffers[i].back() == std::byte{0x5A});
      }
    }
  });
}

TEST_CASE("direct reads give the bytes of the file, and its ragged end") {
  with_every_reader([](Reader& reader) {
    const TestFile file(kFileSize);
    const DirectIo direct = probe_direct(file.path());
    if (!direct.usable) {
      MESSAGE("skipped, no direct I/O in the temporary folder: ", direct.reason);
      return;
    }
    const UniqueFd fd(::open(file.path(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    const int64_t length = align_up(kFileSize, 4096);
    const Mapping buffer = map_pages(length);
    // Twice, so that it also comes from the page cache.
    for (int round = 0; round < 2; ++round) {
      std::memset(buffer.get(), 0, length);
      const ReadRequest request = {.fd = fd.get(), .buffer = buffer.get(), .offset = 0, .length = length, .token = 1};
      REQUIRE(read_one(reader, request) == kFileSize);
      REQUIRE(holds_file_bytes(buffer.get(), 0, kFileSize));
      std::ifstream(file.path()).ignore(kFileSize);
    }
  });
}

TEST_CASE("reads end at the end of the file") {
  with_every_reader([](Reader& reader) {
    const TestFile file(1000);
    std::byte buffer[64];
    ReadRequest request = {.fd = file.fd(), .buffer = buffer, .offset = 990, .length = 64, .token = 1};
    CHECK(read_one(reader, request) == 10);
    CHECK(holds_file_bytes(buffer, 990, 10));
    request.offset = 1000;
    CHECK(read_one(reader, request) == 0);
    request.offset = 1'000'000;
    CHECK(read_one(reader, request) == 0);
  });
}

TEST_CASE("a bad read gives its error as its completion and harms no other") {
  with_every_reader([](Reader& reader) {
    const TestFile file(1000);
    std::byte good[100];
    std::byte bad[100];
    const ReadRequest requests[] = {
        {.fd = -1, .buffer = bad, .offset = 0, .length = 100, .token = 1},
        {.fd = file.fd(), .buffer = good, .offset = 0, .length = 100, .token = 2},
        {.fd = file.fd(), .buffer = nullptr, .offset = 0, .length = 100, .token = 3},
    };
    REQUIRE(reader.submit(requests) == 0);
    const auto results = take(reader, 3);
    CHECK(results.at(1) == -EBADF);
    CHECK(results.at(2) == 100);
    CHECK(holds_file_bytes(good, 0, 100));
    CHECK(results.at(3) == -EFAULT);
  });
}

TEST_CASE("wait returns 0 when time runs out") {
  with_every_reader([](Reader& reader) {
    ReadCompletion completion;
    const auto begin = std::chrono::steady_clock::now();
    CHECK(reader.wait({&completion, 1}, 0ms) == 0);
    CHECK(reader.wait({&completion, 1}, 50ms) == 0);
    const auto waited = std::chrono::steady_clock::now() - begin;
    CHECK(waited >= 50ms);
    CHECK(waited < 10s);

    // A pipe stands for storage that does not answer for a while.
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    const UniqueFd from(ends[0]);
    const UniqueFd to(ends[1]);
    if (reader.name() == "pread") return;  // pread(2) refuses pipes
    std::byte byte{};
    const ReadRequest request = {.fd = from.get(), .buffer = &byte, .offset = 0, .length = 1, .token = 5};
    REQUIRE(reader.submit({&request, 1}) == 0);
    CHECK(reader.wait({&completion, 1}, 20ms) == 0);
    REQUIRE(::write(to.get(), "x", 1) == 1);
    REQUIRE(reader.wait({&completion, 1}, 5000ms) == 1);
    CHECK(completion.token == 5);
    CHECK(completion.result == 1);
    CHECK(byte == std::byte{'x'});
  });
}

TEST_CASE("a signal neither ends a wait early nor breaks it") {
  with_every_reader([](Reader& reader) {
    struct sigaction action = {};
    struct sigaction before;
    action.sa_handler = [](int) {};
    REQUIRE(::sigaction(SIGUSR1, &action, &before) == 0);
    const pthread_t waiter = ::pthread_self();
    std::jthread sender([waiter] {
      for (int i = 0; i < 5; ++i) {
        std::this_thread::sleep_for(10ms);
        ::pthread_kill(waiter, SIGUSR1);
      }
    });
    ReadCompletion completion;
    const auto begin = std::chrono::steady_clock::now();
    CHECK(reader.wait({&completion, 1}, 100ms) == 0);
    CHECK(std::chrono::steady_clock::now() - begin >= 100ms);
    sender.join();
    ::sigaction(SIGUSR1, &before, nullptr);
  });
}

TEST_CASE("registered buffers and files give the same bytes") {
  auto reader = make_uring();
  if (reader == nullptr) return;
  const TestFile file(kFileSize);
  constexpr size_t kSize = 64 << 10;
  const Mapping memory = map_pages(2 * kSize);
  const int first = reader->register_buffer(memory.get(), kSize);
  const int second = reader->register_buffer(memory.get() + kSize, kSize);
  if (first < 0) {
    MESSAGE("skipped, buffers cannot be registered here: ", std::strerror(-first));
    return;
  }
  const int index = reader->register_file(file.fd());
  REQUIRE(index >= 0);
  REQUIRE(second != first);

  // Inside a buffer, both buffers, with and without the file registered.
  const ReadRequest requests[] = {
      {.file_index = index, .buffer_index = first, .buffer = memory.get() + 3, .offset = 77, .length = 999, .token = 1},
      {.file_index = index,
       .buffer_index = second,
       .buffer = memory.get() + kSize,
       .offset = 5,
       .length = 9,
       .token = 2},
      {.fd = file.fd(), .buffer_index = second, .buffer = memory.get() + 2 * kSize - 8, .length = 8, .token = 3},
  };
  REQUIRE(reader->submit(requests) == 0);
  const auto results = take(*reader, 3);
  for (const ReadRequest& request : requests) {
    CHECK(results.at(request.token) == request.length);
    CHECK(holds_file_bytes(request.buffer, request.offset, request.length));
  }

  SUBCASE("memory outside of the registered buffer is refused") {
    const ReadRequest outside = {
        .fd = file.fd(), .buffer_index = first, .buffer = memory.get() + kSize - 4, .length = 8, .token = 9};
    CHECK(read_one(*reader, outside) == -EFAULT);
  }
  SUBCASE("a file that is not open cannot be registered") { CHECK(reader->register_file(-1) < 0); }
  SUBCASE("the table of files ends") {
    int last = 0;
    for (int i = 0; i < 10'000 && last >= 0; ++i) last = reader->register_file(file.fd());
    CHECK(last == -ENOSPC);
  }
  SUBCASE("a buffer that is not mapped cannot be registered") { CHECK(reader->register_buffer(nullptr, kSize) < 0); }
}

TEST_CASE("a ring may be made on one thread and used on another") {
  auto reader = make_uring();
  if (reader == nullptr) return;
  const TestFile file(1000);
  const int index = reader->register_file(file.fd());
  std::byte buffer[100];
  int64_t result = 0;
  std::jthread([&] {
    result = read_one(*reader, {.file_index = index, .buffer = buffer, .offset = 7, .length = 100, .token = 1});
    reader.reset();
  }).join();
  CHECK(result == 100);
  CHECK(holds_file_bytes(buffer, 7, 100));
}

TEST_CASE("a reader that ends with reads in flight writes no memory afterwards") {
  constexpr int64_t kSize = 8 << 20;
  const TestFile file(kSize);
  const UniqueFd direct(::open(file.path(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  for (int round = 0; round < 20; ++round) {
    for (const bool uring : {false, true}) {
      auto reader = uring ? make_uring() : make_pread_reader({8, 8});
      if (reader == nullptr) continue;
      const Mapping buffer = map_pages(kSize);
      std::vector<ReadRequest> requests;
      for (int64_t offset = 0; offset < kSize; offset += kSize / 8) {
        requests.push_back({.fd = round % 2 == 0 && direct ? direct.get() : file.fd(),
                            .buffer = buffer.get() + offset,
                            .offset = offset,
                            .length = kSize / 8,
                            .token = 1});
      }
      file.drop_from_cache();
      REQUIRE(reader->submit(requests) == 0);
      reader.reset();
      std::memset(buffer.get(), 0x33, kSize);
      std::this_thread::sleep_for(1ms);
      REQUIRE(std::all_of(buffer.get(), buffer.get() + kSize, [](std::byte b) { return b == std::byte{0x33}; }));
    }
  }
}

TEST_CASE("readers leave no thread and no file descriptor behind") {
  const TestFile file(kFileSize);
  const int threads = count_threads();
  const int fds = count_entries("/proc/self/fd");
  for (int round = 0; round < 5; ++round) {
    for (auto& reader : {make_pread_reader({8, 8}), make_uring()}) {
      if (reader == nullptr) continue;
      reader->register_file(file.fd());
      std::byte buffer[1000];
      CHECK(read_one(*reader, {.fd = file.fd(), .buffer = buffer, .length = 1000, .token = 1}) == 1000);
    }
  }
  CHECK(becomes([threads] { return count_threads() == threads; }));
  CHECK(count_entries("/proc/self/fd") == fds);
}

TEST_CASE("threads of the pread pool are named and block every signal") {
  const auto reader = make_pread_reader({3, 3});
  // "SigBlk" has one bit per signal; the kernel never lets SIGKILL (9) and SIGSTOP (19) be blocked, nor the C library
  // its own two (32, 33).
  constexpr uint64_t kBlockable = ~uint64_t{0} & ~(uint64_t{1} << 8 | uint64_t{1} << 18 | uint64_t{3} << 31);
  const auto count = [] {
    int pool_threads = 0;
    for (const auto& entry : fs::directory_iterator("/proc/self/task")) {
      std::ifstream status(entry.path() / "status");
      std::string text((std::istreambuf_iterator<char>(status)), {});
      if (text.find("wl-pread") == std::string::npos) continue;
      const uint64_t blocked = std::stoull(text.substr(text.find("SigBlk:") + 7, 20), nullptr, 16);
      if ((blocked & kBlockable) == kBlockable) ++pool_threads;
    }
    return pool_threads;
  };
  CHECK(becomes([&] { return count() == 3; }));
  sigset_t here;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &here);
  CHECK(::sigismember(&here, SIGINT) == 0);
}

TEST_CASE("reads of storage and copies out of the page cache share the threads, each within its number") {
  const TestFile file(1 << 20);
  for (const PreadOptions options : {PreadOptions{5, 1}, PreadOptions{1, 4}, PreadOptions{3, 0}}) {
    const auto reader = make_pread_reader(options);
    // Every thread has one in hand, and four copies wait for each that may make them.
    CHECK(reader->queue_depth() == std::max(options.num_waiting, options.num_copying) + 3 * options.num_copying);
    Mapping buffer = map_pages(1 << 20);
    for (int round = 0; round < 50; ++round) {
      std::vector<ReadRequest> requests;
      for (int i = 0; i < reader->queue_depth(); ++i) {
        ReadRequest request;
        request.fd = file.fd();
        request.buffer = buffer.get() + i * 4096;
        request.offset = i * 4096;
        request.length = 4096;
        request.cached = options.num_copying > 0 && (i + round) % 2 != 0;
        request.token = static_cast<uint64_t>(i);
        requests.push_back(request);
      }
      REQUIRE(reader->submit(requests) == 0);
      for (const auto& [token, result] : take(*reader, requests.size())) CHECK(result == 4096);
    }
    CHECK(buffer[4097] == expected_byte(4097));
  }
}

TEST_CASE("io_uring says why it cannot be had") {
  const auto refusal_in_child = [](const std::function<void()>& prepare, const char* expected) {
    return in_child([&] {
      prepare();
      std::string refusal;
      if (make_uring_reader({.queue_depth = 8}, &refusal) != nullptr) return 1;
      if (refusal.find(expected) != std::string::npos) return 0;
      std::fprintf(stderr, "refusal: %s\n", refusal.c_str());
      return 2;
    });
  };
  std::string refusal;
  CHECK(make_uring_reader({.queue_depth = 0}, &refusal) == nullptr);
  CHECK(!refusal.empty());
  if (make_uring() == nullptr) return;

  CHECK(refusal.find("queue depth 0") != std::string::npos);
  CHECK(refusal_in_child([] { forbid_system_call(SYS_io_uring_setup, EPERM); }, "seccomp") == 0);
  CHECK(refusal_in_child([] { forbid_system_call(SYS_io_uring_setup, ENOSYS); }, "no io_uring") == 0);
  CHECK(refusal_in_child([] { forbid_system_call(SYS_io_uring_setup, ENOMEM); }, "no memory") == 0);
  CHECK(refusal_in_child([] { forbid_system_call(SYS_io_uring_setup, EINVAL); }, "too old") == 0);
  CHECK(refusal_in_child([] { forbid_system_call(SYS_io_uring_register, EPERM); }, "io_uring_register") == 0);
  const auto no_fds = [] {
    const rlimit none = {.rlim_cur = 0, .rlim_max = 0};
    ::setrlimit(RLIMIT_NOFILE, &none);
  };
  CHECK(refusal_in_child(no_fds, "RLIMIT_NOFILE") == 0);
}

TEST_CASE("io_uring that is forbidden after its set-up is an error of the reader, not a hang") {
  if (make_uring() == nullptr) return;
  const TestFile file(1000);
  CHECK(in_child([&] {
          std::string refusal;
          auto reader = make_uring_reader({.queue_depth = 8}, &refusal);
          if (reader == nullptr) return 1;
          forbid_system_call(SYS_io_uring_enter, EPERM);
          std::byte buffer[10];
          const ReadRequest request = {.fd = file.fd(), .buffer = buffer, .length = 10, .token = 1};
          if (reader->submit({&request, 1}) != -EPERM) return 2;
          ReadCompletion completion;
          if (reader->wait({&completion, 1}, 100ms) != -EPERM) return 3;
          return 0;
        }) == 0);
}

TEST_CASE("requests that the kernel has no memory for go in later") {
  if (make_uring() == nullptr) return;
  const TestFile file(1000);
  CHECK(in_child([&] {
          std::string refusal;
          auto reader = make_uring_reader({.queue_depth = 8}, &refusal);
          if (reader == nullptr) return 1;
          forbid_system_call(SYS_io_uring_enter, EAGAIN);
          std::byte buffer[10];
          const ReadRequest request = {.fd = file.fd(), .buffer = buffer, .length = 10, .token = 1};
          if (reader->submit({&request, 1}) != 0) return 2;
          ReadCompletion completion;
          if (reader->wait({&completion, 1}, 50ms) != 0) return 3;
          return 0;
        }) == 0);
}

TEST_CASE("beyond the limit of locked memory reads go unregistered") {
  if (make_uring() == nullptr) return;
  const TestFile file(kFileSize);
  const auto with_limit = [&](rlim_t limit) {
    return in_child([&] {
      const rlimit locked = {.rlim_cur = limit, .rlim_max = limit};
      if (::setrlimit(RLIMIT_MEMLOCK, &locked) != 0) return 1;
      become_nobody();
      std::string refusal;
      auto reader = make_uring_reader({.queue_depth = 8}, &refusal);
      // Some kernels count the ring itself.
      if (reader == nullptr) return limit == 0 && refusal.find("RLIMIT_MEMLOCK") != std::string::npos ? 0 : 2;
      std::vector<std::byte> buffer(1 << 20);
      const int index = reader->register_buffer(buffer.data(), buffer.size());
      if (index != -ENOMEM) return 3;
      const ReadRequest request = {
          .fd = file.fd(), .buffer_index = index, .buffer = buffer.data(), .length = kFileSize, .token = 1};
      if (reader->submit({&request, 1}) != 0) return 4;
      ReadCompletion completion;
      if (reader->wait({&completion, 1}, 5000ms) != 1 || completion.result != kFileSize) return 5;
      return holds_file_bytes(buffer.data(), 0, kFileSize) ? 0 : 6;
    });
  };
  CHECK(with_limit(0) == 0);
  CHECK(with_limit(256 << 10) == 0);
}

TEST_CASE("residency follows what is read and dropped") {
  const int64_t size = (8 << 20) + 100;
  const TestFile file(size);
  const Residency residency(file.fd());
  if (residency.method() == "unknown") {
    MESSAGE("skipped, residency cannot be told here: ",
            std::strerror(static_cast<int>(-residency.resident_bytes(0, 1))));
    return;
  }
  CHECK(residency.resident_bytes(0, 0) == 0);
  file.drop_from_cache();
  const int64_t dropped = residency.resident_bytes(0, size);
  if (dropped == size) {
    MESSAGE("skipped, the temporary folder is in memory");
    return;
  }
  CHECK(dropped < size / 2);  // a few folios may stay

  std::vector<char> buffer(size);
  ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_RANDOM);  // nothing is read ahead
  REQUIRE(::pread(file.fd(), buffer.data(), 1 << 20, 2 << 20) == 1 << 20);
  const std::vector<ByteRange> absent = residency.absent_ranges(0, size);
  int64_t absent_bytes = 0;
  for (const ByteRange range : absent) {
    CHECK((range.end <= 2 << 20 || 3 << 20 <= range.begin));
    absent_bytes += range.size();
  }
  const int64_t resident = residency.resident_bytes(0, size);
  CHECK(std::abs(size - resident - absent_bytes) < 4096);  // the last page counts whole as resident
  CHECK(residency.absent_ranges(2 << 20, 1 << 20).empty());

  REQUIRE(::pread(file.fd(), buffer.data(), size, 0) == size);
  CHECK(residency.resident_bytes(0, size) == size);
  CHECK(residency.absent_ranges(0, size).empty());
  CHECK(residency.resident_bytes(100, 50) == 50);
  CHECK(residency.resident_bytes(4000, 200) == 200);
  CHECK(residency.resident_bytes(size + (16 << 20), 1 << 20) == 0);
}

TEST_CASE("residency falls back to mincore, and tells the same") {
  const int64_t size = 1 << 20;
  const TestFile file(size);
  file.drop_from_cache();
  const int64_t dropped = Residency(file.fd()).resident_bytes(0, size);
  CHECK(in_child([&] {
          constexpr unsigned kCachestat = 451;
          forbid_system_call(kCachestat, ENOSYS);
          const Residency residency(file.fd());
          if (residency.method() != "mincore") return 1;
          if (residency.resident_bytes(0, size) != dropped) return 6;
          std::vector<char> buffer(size);
          if (::pread(file.fd(), buffer.data(), size, 0) != size) return 2;
          if (residency.resident_bytes(0, size) != size) return 3;
          if (residency.resident_bytes(4095, 2) != 2) return 4;
          if (residency.resident_bytes(size + (64 << 20), size) != 0) return 5;
          return 0;
        }) == 0);
}

TEST_CASE("residency of a file that the process could not write is unknown, not wrong") {
  if (::geteuid() != 0) return;  // the test's own files can be written
  const TestFile file(1 << 20);
  REQUIRE(::chmod(file.path(), 0644) == 0);
  file.drop_from_cache();
  CHECK(in_child([&] {
          forbid_system_call(451, ENOSYS);
          become_nobody();
          const UniqueFd fd(::open(file.path(), O_RDONLY | O_CLOEXEC));
          if (!fd) return 1;
          const Residency residency(fd.get());
          if (residency.method() != "unknown") return 2;
          return residency.resident_bytes(0, 1 << 20) == -EPERM ? 0 : 3;
        }) == 0);
}

TEST_CASE("residency of what is no file is unknown") {
  const Residency residency(-1);
  CHECK(residency.method() == "unknown");
  CHECK(residency.resident_bytes(0, 100) == -EBADF);
}

TEST_CASE("the probe finds alignments that work") {
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{513}, kFileSize}) {
    const TestFile file(size);
    const int fds = count_entries("/proc/self/fd");
    const DirectIo direct = probe_direct(file.path());
    CHECK(count_entries("/proc/self/fd") == fds);
    CAPTURE(size);
    CAPTURE(direct.reason);
    if (!direct.usable) {
      CHECK(!direct.reason.empty());
      CHECK(!direct.proven);
      continue;
    }
    CHECK(direct.proven == direct.reason.empty());
    const UniqueFd fd(::open(file.path(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    REQUIRE(fd);
    // As loosely aligned as allowed.
    const Mapping pages = map_pages(2 << 20);
    const int64_t offset = size > direct.offset_alignment ? direct.offset_alignment : 0;
    const int64_t length = align_up(kFileSize, direct.offset_alignment);
    CHECK(::pread(fd.get(), pages.get() + direct.memory_alignment, length, offset) == size - offset);
    CHECK(holds_file_bytes(pages.get() + direct.memory_alignment, offset, size - offset));
  }
}

TEST_CASE("the probe never says proven of a file system in memory") {
  if (!fs::exists("/dev/shm")) return;
  const TestFile file(kFileSize, "/dev/shm");
  const DirectIo direct = probe_direct(file.path());
  CHECK(!direct.proven);
  CHECK(!direct.reason.empty());
  if (direct.usable) CHECK(direct.reason.starts_with("direct (unproven): "));
}

TEST_CASE("the probe refuses what is no file, without waiting") {
  CHECK(!probe_direct("/nonexistent/model.safetensors").usable);
  CHECK(probe_direct("/nonexistent/model.safetensors").reason.find("No such file") != std::string::npos);
  CHECK(probe_direct("/tmp").reason == "not a regular file");
  const std::string pipe = (fs::temp_directory_path() / ("weightlift-pipe-" + std::to_string(::getpid()))).string();
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(probe_direct(pipe.c_str()).reason == "not a regular file");
  ::unlink(pipe.c_str());
}

TEST_CASE("the faulty reader does what its plan says") {
  const TestFile file(10'000);
  std::vector<std::byte> buffer(10'000);
  const auto request = [&](int64_t offset, int64_t length, uint64_t token) {
    return ReadRequest{
        .fd = file.fd(), .buffer = buffer.data() + offset, .offset = offset, .length = length, .token = token};
  };

  SUBCASE("short reads are short, in blocks, and right") {
    FaultyReader reader(4, {.short_chance = 1, .short_block = 512});
    const int64_t n = read_one(reader, request(0, 4096, 1));
    CHECK(n > 0);
    CHECK(n < 4096);
    CHECK(n % 512 == 0);
    CHECK(holds_file_bytes(buffer.data(), 0, n));
    CHECK(read_one(reader, request(0, 512, 1)) == 512);
  }
  SUBCASE("interruptions end") {
    FaultyReader reader(4, {.interrupt_chance = 0.9});
    int64_t n;
    do {
      n = read_one(reader, request(0, 100, 1));
      CHECK((n == 100 || n == -EINTR || n == -EAGAIN));
    } while (n < 0);
  }
  SUBCASE("errors come at a read and at an offset") {
    FaultyReader reader(4, {.fail_read = 1, .fail_offset = 5000});
    CHECK(read_one(reader, request(0, 100, 1)) == 100);
    CHECK(read_one(reader, request(0, 100, 1)) == -EIO);
    CHECK(read_one(reader, request(4900, 100, 1)) == 100);
    CHECK(read_one(reader, request(4900, 101, 1)) == -EIO);
  }
  SUBCASE("the file ends early") {
    FaultyReader reader(4, {.end_of_file = 50});
    CHECK(read_one(reader, request(0, 100, 1)) == 50);
    CHECK(read_one(reader, request(50, 100, 1)) == 0);
  }
  SUBCASE("completions come late and in another order, each once") {
    FaultyReader reader(64, {.out_of_order = true, .max_delay = 5});
    std::vector<ReadRequest> requests;
    for (uint64_t i = 0; i < 64; ++i) requests.push_back(request(static_cast<int64_t>(i) * 100, 100, i));
    REQUIRE(reader.submit(requests) == 0);
    CHECK(reader.max_in_flight() == 64);
    CHECK(take(reader, 64).size() == 64);
    CHECK(holds_file_bytes(buffer.data(), 0, 6400));
    CHECK(reader.in_flight() == 0);
    CHECK(reader.num_reads() == 64);
    CHECK(reader.num_bytes() == 6400);
  }
  SUBCASE("the reader as a whole fails") {
    FaultyReader reader(4, {.fail_submit = 0, .fail_wait = 0});
    const ReadRequest one = request(0, 1, 1);
    ReadCompletion completion;
    CHECK(reader.submit({&one, 1}) == -EIO);
    CHECK(reader.wait({&completion, 1}, 1ms) == -EIO);
    CHECK(reader.wait({&completion, 1}, 1ms) == 0);
  }
}

#include "readers/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "readers/residency.h"
#include "util/align.h"
#include "util/unique_fd.h"

namespace weightlift {
namespace {

// Tried where the file system does not tell: the sector of nearly every disk, then the page. Enough for memory as well.
constexpr int64_t kAlignments[] = {512, 4096};
constexpr int64_t kBlock = 64 << 10;  // the largest page size of any architecture; probe reads start at a multiple

// struct statx of Linux 6.1, of which C libraries may know less: the first fields and the two that are asked for.
constexpr unsigned kStatxDioAlign = 0x2000;
struct StatxDioAlign {
  uint32_t mask;
  std::byte other[148];
  uint32_t memory_alignment;
  uint32_t offset_alignment;
  std::byte spare[96];
};
static_assert(sizeof(StatxDioAlign) == 256 && offsetof(StatxDioAlign, memory_alignment) == 152);

// An anonymous mapping: aligned to the page.
class Pages {
 public:
  explicit Pages(int64_t size)
      : size_(size), data_(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() {
    if (*this) ::munmap(data_, size_);
  }
  explicit operator bool() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  int64_t size_;
  void* data_;
};

DirectIo refused(std::string reason) {
  DirectIo direct;
  direct.reason = std::move(reason);
  return direct;
}

DirectIo usable(int64_t memory_alignment, int64_t offset_alignment, bool proven, std::string reason = {}) {
  return {.usable = true,
          .proven = proven,
          .memory_alignment = memory_alignment,
          .offset_alignment = offset_alignment,
          .reason = std::move(reason)};
}

// 0 if one read works, or the errno. An end of file is fine.
int try_read(int fd, const Pages& pages, int64_t offset, int64_t length) {
  ssize_t n;
  do {
    n = ::pread(fd, pages.data(), static_cast<size_t>(length), offset);
  } while (n < 0 && errno == EINTR);
  return n < 0 ? errno : 0;
}

// The start of a block of the file that is not in the page cache, if one of a few is not. The first comes last: whoever
// read the header has brought it in.
std::optional<int64_t> find_uncached_block(const Residency& residency, int64_t file_size) {
  for (const int64_t candidate : {file_size / 2, file_size / 4, file_size - 1, int64_t{0}}) {
    const int64_t offset = align_down(candidate, kBlock);
    if (residency.resident_bytes(offset, kBlock) == 0) return offset;
  }
  return std::nullopt;
}

// For file systems that do not tell an alignment. Some take any and read through the page cache what is aligned to less
// than their own block (btrfs), so a greater alignment may prove what a smaller one did not.
DirectIo probe_by_reading(int fd, const Pages& pages, int64_t file_size) {
  const Residency residency(fd);
  DirectIo answer = refused(std::string("a direct read failed: ") + ::strerror(EINVAL));
  for (const int64_t alignment : kAlignments) {
    std::optional<int64_t> uncached;
    if (file_size > 0) uncached = find_uncached_block(residency, file_size);
    const int64_t offset = uncached.value_or(0);
    const int error = try_read(fd, pages, offset, alignment);
    if (error == EINVAL) continue;
    if (error != 0) return refused(std::string("a direct read failed: ") + ::strerror(error));
    const char* doubt = nullptr;
    if (file_size == 0) {
      doubt = "the file is empty";
    } else if (residency.method() == "unknown") {
      doubt = "this process may not see what the page cache holds";
    } else if (!uncached) {
      doubt = "the file is in the page cache";
    } else if (residency.resident_bytes(offset, kBlock) != 0) {
      doubt = "a read went through the page cache";
    }
    if (doubt == nullptr) return usable(alignment, alignment, true);
    answer = usable(alignment, alignment, false, std::string("direct (unproven): ") + doubt);
  }
  return answer;
}

}  // namespace

DirectIo probe_direct(const char* path, UniqueFd* opened) {
  struct stat stat;
  if (::stat(path, &stat) != 0) return refused(std::string("cannot stat the file: ") + ::strerror(errno));
  if (!S_ISREG(stat.st_mode)) return refused("not a regular file");

  // Non-blocking, which regular files ignore: should the path be a pipe by now, open must not wait for a writer.
  UniqueFd fd(::open(path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NONBLOCK));
  if (!fd && errno == EINVAL) return refused("the file system refuses O_DIRECT");
  if (!fd) return refused(std::string("cannot open the file with O_DIRECT: ") + ::strerror(errno));
  ::fcntl(fd.get(), F_SETFL, O_DIRECT);  // reads shall wait for the device
  const Pages pages(kBlock);
  if (!pages) return refused(std::string("no memory for a probe read: ") + ::strerror(errno));

  StatxDioAlign told = {};
  const bool answered = ::syscall(SYS_statx, fd.get(), "", AT_EMPTY_PATH, kStatxDioAlign, &told) == 0 &&
                        (told.mask & kStatxDioAlign) != 0;
  if (answered && told.offset_alignment == 0) return refused("the file system does no direct I/O on this file");
  if (answered && std::has_single_bit(told.memory_alignment) && std::has_single_bit(told.offset_alignment) &&
      told.offset_alignment <= kBlock) {
    // Believed once a read has worked: a file system stacked upon another may promise what that one does not keep.
    const int error = try_read(fd.get(), pages, 0, told.offset_alignment);
    if (error == 0) {
      DirectIo answer = usable(told.memory_alignment, told.offset_alignment, true);
      answer.told = true;
      if (opened) *opened = std::move(fd);
      return answer;
    }
    if (error != EINVAL) return refused(std::string("a direct read failed: ") + ::strerror(error));
  }
  DirectIo answer = probe_by_reading(fd.get(), pages, stat.st_size);
  if (opened && answer.usable) *opened = std::move(fd);
  return answer;
}

DirectIo DirectProbes::of(const char* path, uint64_t device, UniqueFd* opened) {
  {
    const std::lock_guard lock(mutex_);
    const auto known = proven_.find(device);
    if (known != proven_.end()) return known->second;
  }
  DirectIo direct = probe_direct(path, opened);
  note(device, direct);
  return direct;
}

void DirectProbes::note(uint64_t device, const DirectIo& found) {
  const std::lock_guard lock(mutex_);
  if (found.proven && !found.told) proven_[device] = found;
}

}  // namespace weightlift

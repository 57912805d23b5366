#include "readers/residency.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "util/align.h"

namespace weightlift {
namespace {

constexpr long kCachestatSyscall = 451;  // on every architecture; Linux 6.5, newer than many C libraries
constexpr decltype(statfs::f_type) kOverlayfsMagic = 0x794c7630;

// A mapping that is never touched costs nothing but address space; this bounds that, and mincore's answer to 64 KiB.
constexpr int64_t kMincoreWindow = int64_t{256} << 20;

int64_t page_size() {
  static const int64_t size = ::sysconf(_SC_PAGESIZE);
  return size;
}

// As in linux/mman.h of Linux 6.5.
struct CachestatRange {
  uint64_t offset;
  uint64_t length;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;  // pages
};

// Resident pages of a range, or -errno.
int64_t pages_by_cachestat(int fd, int64_t offset, int64_t length) {
  CachestatRange range = {static_cast<uint64_t>(offset), static_cast<uint64_t>(length)};
  Cachestat stat = {};
  if (::syscall(kCachestatSyscall, fd, &range, &stat, 0) != 0) return -errno;
  return static_cast<int64_t>(stat.cached);
}

// Calls visit(offset, state) for each page of a range: the lowest bit of a state says whether it is resident. Returns 0
// or -errno. REQUIRES: offset is a multiple of the page size.
template <typename Visit>
int64_t for_each_page(int fd, int64_t offset, int64_t length, const Visit& visit) {
  std::vector<unsigned char> states;
  for (int64_t done = 0; done < length; done += kMincoreWindow) {
    const int64_t window = std::min(kMincoreWindow, length - done);
    // Never touched, so a file that is truncated meanwhile does no harm.
    void* mapping = ::mmap(nullptr, window, PROT_NONE, MAP_PRIVATE, fd, offset + done);
    if (mapping == MAP_FAILED) return -errno;
    states.resize(align_up(window, page_size()) / page_size());
    const int error = ::mincore(mapping, window, states.data()) == 0 ? 0 : errno;
    ::munmap(mapping, window);
    if (error != 0) return -error;
    int64_t page = offset + done;
    for (const unsigned char state : states) visit(std::exchange(page, page + page_size()), state);
  }
  return 0;
}

// Resident pages of a range, or -errno. REQUIRES: as for_each_page.
int64_t pages_by_mincore(int fd, int64_t offset, int64_t length) {
  int64_t pages = 0;
  const int64_t error = for_each_page(fd, offset, length, [&](int64_t, unsigned char state) { pages += state & 1; });
  return error < 0 ? error : pages;
}

// 0 if mincore can be believed of this file, or -errno. Of a file that the process could not write it says that all is
// resident, without an error; so it is asked for a page behind the end of the file, beyond any large folio.
int64_t mincore_error(int fd) {
  struct stat stat;
  if (::fstat(fd, &stat) != 0) return -errno;
  const int64_t beyond = align_up(stat.st_size, page_size()) + (int64_t{64} << 20);
  const int64_t pages = pages_by_mincore(fd, beyond, page_size());
  return pages > 0 ? -EPERM : pages;
}

}  // namespace

Residency::Residency(int fd) : fd_(fd) {
  struct statfs file_system;
  if (::fstatfs(fd, &file_system) != 0) {
    error_ = -errno;
    return;
  }
  if (file_system.f_type != kOverlayfsMagic && pages_by_cachestat(fd, 0, page_size()) >= 0) {
    method_ = Method::kCachestat;
    return;
  }
  error_ = mincore_error(fd);
  if (error_ == 0) method_ = Method::kMincore;
}

int64_t Residency::resident_bytes(int64_t offset, int64_t length) const {
  if (method_ == Method::kUnknown) return error_;
  if (length <= 0) return 0;
  const int64_t begin = align_down(offset, page_size());
  const int64_t pages = method_ == Method::kCachestat ? pages_by_cachestat(fd_, begin, offset + length - begin)
                                                      : pages_by_mincore(fd_, begin, offset + length - begin);
  return pages < 0 ? pages : std::min(pages * page_size(), length);
}

std::vector<ByteRange> Residency::absent_ranges(int64_t offset, int64_t length) const {
  std::vector<ByteRange> absent;
  if (method_ == Method::kUnknown || length <= 0) return absent;
  if (resident_bytes(offset, length) == 0) return {{offset, offset + length}};
  // Which pages are there, mincore alone says; it tells the truth wherever one of the two does.
  for_each_page(fd_, offset, length, [&](int64_t page, unsigned char state) {
    if ((state & 1) != 0) return;
    const int64_t end = std::min(page + page_size(), offset + length);
    if (!absent.empty() && absent.back().end == page) {
      absent.back().end = end;
    } else {
      absent.push_back({page, end});
    }
  });
  return absent;
}

std::string_view Residency::method() const {
  switch (method_) {
    case Method::kCachestat:
      return "cachestat";
    case Method::kMincore:
      return "mincore";
    case Method::kUnknown:
      break;
  }
  return "unknown";
}

}  // namespace weightlift

#include "readers/residency.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
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

// The same. REQUIRES: offset is a multiple of the page size.
int64_t pages_by_mincore(int fd, int64_t offset, int64_t length) {
  std::vector<unsigned char> resident;
  int64_t pages = 0;
  for (int64_t done = 0; done < length; done += kMincoreWindow) {
    const int64_t window = std::min(kMincoreWindow, length - done);
    // Never touched, so a file that is truncated meanwhile does no harm.
    void* mapping = ::mmap(nullptr, window, PROT_NONE, MAP_PRIVATE, fd, offset + done);
    if (mapping == MAP_FAILED) return -errno;
    resident.resize(align_up(window, page_size()) / page_size());
    const int error = ::mincore(mapping, window, resident.data()) == 0 ? 0 : errno;
    ::munmap(mapping, window);
    if (error != 0) return -error;
    pages += std::count_if(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; });
  }
  return pages;
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

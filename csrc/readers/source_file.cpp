#include "readers/source_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace weightlift {
namespace {

// A window counts as resident when at least this share of it is in the page cache: reading the few missing pages
// through the cache is cheaper than fetching all the others again.
constexpr double kResidentShare = 0.95;

// Does not wait for the other end of a pipe that has taken the file's place.
int open_retrying(const std::string& path, int flags) {
  for (;;) {
    const int fd = ::open(path.c_str(), flags | O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    // Reads shall wait for the device, whatever O_NONBLOCK means for files one day.
    if (fd >= 0) ::fcntl(fd, F_SETFL, flags);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

}  // namespace

Fault SourceFile::open(Strategy strategy) {
  if (buffered_) return {};
  UniqueFd fd(open_retrying(path_, 0));
  if (!fd) return {FaultKind::kOpen, errno, index_};
  if (Fault fault = compare(fd.get())) return fault;
  if (strategy != Strategy::kBuffered) {
    if (!probed_) direct_io_ = probe_direct(path_.c_str());
    probed_ = true;
    if (direct_io_.usable) {
      direct_ = UniqueFd(open_retrying(path_, O_DIRECT));
      if (!direct_) return {FaultKind::kOpen, errno, index_};
      if (Fault fault = compare(direct_.get())) return fault;
    } else if (strategy == Strategy::kDirect) {
      return {FaultKind::kUnavailable, 0, index_, -1, -1, direct_io_.reason};
    }
  }
  if (strategy == Strategy::kAuto && direct_) residency_ = std::make_unique<Residency>(fd.get());
  buffered_ = std::move(fd);
  return {};
}

Fault SourceFile::check_unchanged() const { return compare(buffered_.get()); }

Fault SourceFile::compare(int fd) const {
  struct stat st{};
  if (::fstat(fd, &st) != 0) return {FaultKind::kOpen, errno, index_};
  const int64_t mtime_ns = int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
  std::string detail;
  if (st.st_size != identity_.size) {
    detail = "it had " + std::to_string(identity_.size) + " bytes, it has " + std::to_string(st.st_size);
  } else if (st.st_dev != identity_.device || st.st_ino != identity_.inode) {
    detail = "another file has taken its place";
  } else if (mtime_ns != identity_.mtime_ns) {
    detail = "it has been written to";
  } else {
    return {};
  }
  return {FaultKind::kChanged, 0, index_, -1, -1, std::move(detail)};
}

void SourceFile::close() {
  residency_.reset();
  direct_.reset();
  buffered_.reset();
}

ReadMode SourceFile::mode_of(Strategy strategy, ByteRange range) const {
  if (!direct_) return {};
  const ReadMode direct{true, direct_io_.offset_alignment, direct_io_.memory_alignment};
  if (strategy == Strategy::kDirect) return direct;
  range.end = std::min(range.end, identity_.size);
  const int64_t resident = residency_->resident_bytes(range.begin, range.size());
  // Where residency can't be told, nothing is assumed to be cached: direct reads are right in any case.
  const bool cached =
      resident >= 0 && static_cast<double>(resident) >= kResidentShare * static_cast<double>(range.size());
  return cached ? ReadMode{} : direct;
}

}  // namespace weightlift

#include "readers/source_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "util/threads.h"

namespace weightlift {
namespace {

// A window counts as resident when at least this share of it is in the page cache: reading the few missing pages
// through the cache is cheaper than fetching all the others again.
constexpr double kResidentShare = 0.95;

constexpr int kRwfDontCache = 0x80;  // Linux 6.14, newer than C libraries

// Does not wait for the other end of a pipe that has taken the file's place.
int open_retrying(const std::string& path, int flags) {
  for (;;) {
    const int fd = ::open(path.c_str(), flags | O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    // Reads shall wait for the device, whatever O_NONBLOCK means for files one day.
    if (fd >= 0) ::fcntl(fd, F_SETFL, flags);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

// Has a network file system ask its server about a file anew. Otherwise it answers for seconds to hours what it knows;
// then a file that was cut on the server seems whole to stat(2), and NFS gives zeros for what is missing. What can't be
// asked (seccomp) stays as it is known.
void ask_server(int fd, const char* path) {
  struct statx ignored;
  ::statx(fd, path, AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_SIZE | STATX_MTIME, &ignored);
}

}  // namespace

OpenedFile open_both_ways(const std::string& path) {
  OpenedFile opened;
  std::jthread other;
  try {
    const SignalsBlocked blocked;
    other = std::jthread([&] { opened.buffered = UniqueFd(open_retrying(path, 0)); });
  } catch (const std::system_error&) {  // no further thread
  }
  UniqueFd direct;
  DirectIo direct_io = probe_direct(path.c_str(), &direct);
  // Else it is tried again: somebody who reads the header meanwhile may have brought in what was tried, and a refusal
  // may have been want of descriptors.
  if (direct_io.proven) {
    opened.direct = std::move(direct);
    opened.direct_io = std::move(direct_io);
  }
  if (other.joinable()) other.join();
  return opened;
}

Fault SourceFile::open(Strategy strategy, PageCache page_cache, DirectProbes& probes) {
  if (buffered_) return {};
  OpenedFile opened = std::exchange(opened_, {});
  if (opened.buffered && compare(opened.buffered.get())) opened = {};  // replaced before its header was read
  UniqueFd fd = opened.buffered ? std::move(opened.buffered) : UniqueFd(open_retrying(path_, 0));
  if (!fd) return {FaultKind::kOpen, errno, index_};
  if (Fault fault = compare(fd.get())) return fault;
  if (strategy != Strategy::kBuffered) {
    if (opened.direct_io) {
      direct_io_ = std::move(*opened.direct_io);
      probes.note(identity_.device, direct_io_);
    } else if (!probed_) {
      direct_io_ = probes.of(path_.c_str(), identity_.device, &opened.direct);
    }
    probed_ = true;
    if (direct_io_.usable) {
      direct_ = opened.direct ? std::move(opened.direct) : UniqueFd(open_retrying(path_, O_DIRECT));
      if (!direct_) return {FaultKind::kOpen, errno, index_};
      if (Fault fault = compare(direct_.get())) return fault;
    } else if (strategy == Strategy::kDirect) {
      return {FaultKind::kUnavailable, 0, index_, -1, -1, direct_io_.reason};
    }
  }
  if (strategy != Strategy::kDirect || page_cache == PageCache::kLeave)
    residency_ = std::make_unique<Residency>(fd.get());
  if (page_cache == PageCache::kLeave) {
    if (Fault fault = prepare_to_leave(fd.get())) {
      direct_.reset();
      return fault;
    }
  }
  buffered_ = std::move(fd);
  return {};
}

Fault SourceFile::prepare_to_leave(int fd) {
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // nothing is read ahead, here and beyond what is planned
  std::byte byte;
  const iovec memory = {.iov_base = &byte, .iov_len = 1};
  if (::preadv2(fd, &memory, 1, 0, kRwfDontCache) >= 0) buffered_flags_ = kRwfDontCache;
  // Not with the flag alone where it can be helped: of a large folio that two reads share, it leaves one.
  drops_ = residency_->method() != "unknown";
  if (!direct_ && buffered_flags_ == 0 && !drops_) {
    return {
        FaultKind::kUnavailable,
        0,
        index_,
        -1,
        -1,
        "reads can't keep out of the page cache here (no RWF_DONTCACHE), and what to leave in it can't be told, since "
        "only who could write a file may see what is cached of it"};
  }
  return {};
}

void SourceFile::stop_read_ahead() const {
  if (direct_) ::posix_fadvise(buffered_.get(), 0, 0, POSIX_FADV_RANDOM);
}

Fault SourceFile::check_unchanged() const {
  ask_server(buffered_.get(), "");
  return compare(buffered_.get());
}

int64_t SourceFile::current_size() const {
  ask_server(buffered_.get(), "");
  struct stat st{};
  return ::fstat(buffered_.get(), &st) == 0 ? st.st_size : -errno;
}

Fault SourceFile::check_in_place() const {
  ask_server(AT_FDCWD, path_.c_str());
  struct stat st{};
  if (::stat(path_.c_str(), &st) == 0) return compare(st);
  if (errno != ENOENT && errno != ESTALE) return {};
  return {FaultKind::kChanged, 0, index_, -1, -1, "it is gone"};
}

Fault SourceFile::compare(int fd) const {
  struct stat st{};
  if (::fstat(fd, &st) == 0) return compare(st);
  if (errno == ESTALE) return {FaultKind::kChanged, ESTALE, index_, -1, -1, "its server has it no more"};
  return {FaultKind::kOpen, errno, index_};
}

Fault SourceFile::compare(const struct stat& st) const {
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
  for (const ByteRange range : std::exchange(absent_, {})) {
    ::posix_fadvise(buffered_.get(), range.begin, range.size(), POSIX_FADV_DONTNEED);
  }
  opened_ = {};
  residency_.reset();
  direct_.reset();
  buffered_.reset();
}

ReadMode SourceFile::mode_of(Strategy strategy, ByteRange range) {
  const ReadMode direct{
      .direct = true, .offset_alignment = direct_io_.offset_alignment, .memory_alignment = direct_io_.memory_alignment};
  if (strategy == Strategy::kDirect && !drops_) return direct;
  range.end = std::min(range.end, identity_.size);
  const int64_t resident = residency_->resident_bytes(range.begin, range.size());
  // Where residency can't be told, nothing is assumed to be cached: direct reads are right in any case.
  const bool cached = strategy != Strategy::kDirect && resident >= 0 &&
                      static_cast<double>(resident) >= kResidentShare * static_cast<double>(range.size());
  if (drops_ && resident < range.size() && (cached || !direct_io_.proven)) {
    const std::vector<ByteRange> absent = residency_->absent_ranges(range.begin, range.size());
    absent_.insert(absent_.end(), absent.begin(), absent.end());
  }
  return cached ? ReadMode{.cached = true} : direct_ ? direct : ReadMode{};
}

}  // namespace weightlift

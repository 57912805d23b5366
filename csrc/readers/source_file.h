// SourceFile: one file of the checkpoint, open for the ways it is read in, and known to be the one that was parsed.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/planner.h"
#include "readers/probe.h"
#include "readers/residency.h"
#include "util/fault.h"
#include "util/unique_fd.h"

namespace weightlift {

// What a file was when its header was parsed. A file that has become another one would be read at wrong offsets.
struct FileIdentity {
  int64_t size = 0;
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t mtime_ns = 0;
};

// Which way to read: the user's choice, or by what is found.
enum class Strategy { kAuto, kDirect, kBuffered };

// What becomes of the pages that buffered reads bring into the page cache.
enum class PageCache {
  kKeep,   // they stay, for who reads the file next
  kLeave,  // the cache is left as it was found: read with RWF_DONTCACHE where that works, and what was not there before
           // is dropped when the file is closed, where that can be told
};

// A file opened for the ways it is read in, before it is known what it should be.
struct OpenedFile {
  UniqueFd buffered;                  // nothing: it could not be opened
  UniqueFd direct;                    // where direct reads were proven to work
  std::optional<DirectIo> direct_io;  // nothing: it is not known yet
};

// Opens a file for both ways to read at once, and tries direct reads out: across a network that is two round trips, the
// least that reading the file's header takes too. What fails is left for SourceFile::open to try again, and to tell.
OpenedFile open_both_ways(const std::string& path);

class SourceFile {
 public:
  // `opened`: of this path. What is open on another file than `identity` is opened anew.
  SourceFile(int32_t index, std::string path, const FileIdentity& identity, OpenedFile opened = {})
      : index_(index), path_(std::move(path)), identity_(identity), opened_(std::move(opened)) {}

  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;
  ~SourceFile() { close(); }

  const std::string& path() const { return path_; }

  // Opens the file, if it is not open, and probes direct I/O unless the strategy rules it out. Returns a fault when the
  // file can't be opened, is not the file it was, or direct I/O, or to leave the page cache alone, was demanded and
  // can't be had.
  Fault open(Strategy strategy, PageCache page_cache, DirectProbes& probes);
  void close();

  // Whether the open file still is what it was when it was parsed: a fault if it has been written to since. REQUIRES:
  // open.
  Fault check_unchanged() const;
  // Whether that file is still the one at the path: a fault if not. For reads that fail: of a file that its server has
  // lost, they do so in several ways (ESTALE, EIO, EBADF).
  Fault check_in_place() const;

  // Bytes that the open file has by now, or -errno. REQUIRES: open.
  int64_t current_size() const;

  // Where the file is read past the page cache too: has nothing brought into it beyond what is asked for. REQUIRES:
  // open.
  void stop_read_ahead() const;

  int buffered_fd() const { return buffered_.get(); }
  int direct_fd() const { return direct_.get(); }
  int buffered_flags() const { return buffered_flags_; }  // RWF_* of reads through buffered_fd()
  // Valid once open(), and kept after close().
  const DirectIo& direct_io() const { return direct_io_; }

  // How to read [range.begin, range.end), from a multiple of the page size. REQUIRES: open.
  ReadMode mode_of(Strategy strategy, ByteRange range);

 private:
  Fault compare(int fd) const;
  Fault compare(const struct stat& st) const;
  Fault prepare_to_leave(int fd);

  int32_t index_;
  std::string path_;
  FileIdentity identity_;
  OpenedFile opened_;  // until open()
  UniqueFd buffered_;
  UniqueFd direct_;
  DirectIo direct_io_{};
  bool probed_ = false;
  std::unique_ptr<Residency> residency_;
  int buffered_flags_ = 0;
  bool drops_ = false;             // at close(), what reads have brought in:
  std::vector<ByteRange> absent_;  // what was not in the page cache before it was read
};

}  // namespace weightlift

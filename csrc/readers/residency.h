// How much of a file is in the page cache, asked without bringing anything in.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/geometry.h"

namespace weightlift {

// Tries cachestat(2), which knows; then mincore(2), for kernels before 6.5 and for overlayfs, of which cachestat says
// that nothing is resident. Linux tells neither to a process that could not write the file: it gets -EPERM here. The
// answer is of the moment. Threads: may be shared; the file descriptor is the caller's and must outlive this.
class Residency {
 public:
  explicit Residency(int fd);

  // Resident bytes of [offset, offset + length), in whole pages and at most `length`; or -errno. Past the end of the
  // file nothing is resident. REQUIRES: offset >= 0.
  int64_t resident_bytes(int64_t offset, int64_t length) const;

  // The parts of [offset, offset + length) that are not resident, in whole pages, ascending; empty where that can't be
  // told. REQUIRES: offset is a multiple of the page size, and the range ends within the file.
  std::vector<ByteRange> absent_ranges(int64_t offset, int64_t length) const;

  // "cachestat", "mincore" or "unknown"; when unknown, resident_bytes() is always -errno.
  std::string_view method() const;

 private:
  enum class Method { kCachestat, kMincore, kUnknown };

  int fd_;
  Method method_ = Method::kUnknown;
  int64_t error_ = 0;  // -errno, when unknown
};

}  // namespace weightlift

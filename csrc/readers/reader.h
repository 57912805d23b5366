// Reader: many reads of files in flight at once. The one interface between the pipeline and the ways to read.
//
// Threads: a Reader is used by one thread (the lane that owns it); an implementation may have threads of its own.
// Ownership: file descriptors and buffers belong to the caller and must stay valid until the read's completion has been
// taken by wait(), or until the Reader is destroyed: its destructor waits for every read in flight.
// Errors: negative errno values, nothing is thrown after construction. A Reader reports what the kernel said of one
// attempt; it never retries and never joins short reads: that is done once, above, for every implementation.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace weightlift {

struct ReadRequest {
  int fd = -1;            // open for reading
  int file_index = -1;    // what register_file(fd) returned; negative: not registered
  int buffer_index = -1;  // what register_buffer() returned for memory that holds all of [buffer, buffer + length)
  std::byte* buffer = nullptr;  // where the bytes go
  int64_t offset = 0;           // in the file, bytes
  int64_t length = 0;           // bytes, 0 < length <= kMaxReadBytes
  int flags = 0;                // RWF_* of preadv2(2)
  bool cached = false;          // it is expected to be a copy out of the page cache, which keeps a processor busy
  uint64_t token = 0;           // comes back in the completion; the caller's business
};

struct ReadCompletion {
  uint64_t token = 0;
  int64_t result = 0;  // bytes read, possibly fewer than asked for; 0 at the end of the file; -errno
};

// Linux moves at most 0x7ffff000 bytes in one read; a round number below that.
inline constexpr int64_t kMaxReadBytes = int64_t{1} << 30;

class Reader {
 public:
  Reader() = default;
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  virtual ~Reader() = default;

  // "io_uring" or "pread".
  virtual std::string_view name() const = 0;

  // Most requests that may be in flight. Constant.
  virtual int queue_depth() const = 0;

  // Starts the reads. REQUIRES: requests.size() + reads in flight <= queue_depth().
  // Returns 0, or -errno if the reads could not be started for a reason that concerns the reader as a whole (none of
  // them will complete then). A reason that concerns one read comes with that read's completion.
  virtual int submit(std::span<const ReadRequest> requests) = 0;

  // Takes finished reads, in any order. Returns as soon as there is one, after at most `timeout`.
  // Returns the number written to `out` (0: time ran out), or -errno.
  virtual int wait(std::span<ReadCompletion> out, std::chrono::milliseconds timeout) = 0;

  // Offers a buffer for registration (pinned once, not per read). Returns an index >= 0 for ReadRequest::buffer_index,
  // or -errno: reads into that memory then go unregistered, which is slower and just as right. Buffers stay registered
  // until the Reader ends.
  virtual int register_buffer(std::byte* buffer, size_t length) {
    (void)buffer, (void)length;
    return -1;
  }

  // The same for files, which stay open for it until the Reader ends. Returns an index >= 0 for
  // ReadRequest::file_index, or -errno.
  virtual int register_file(int fd) {
    (void)fd;
    return -1;
  }
};

}  // namespace weightlift

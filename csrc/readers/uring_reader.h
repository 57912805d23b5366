// io_uring: deep queues of reads without a thread per read.
#pragma once

#include <memory>
#include <string>

#include "readers/reader.h"

namespace weightlift {

struct UringOptions {
  int queue_depth;  // 1 to kMaxUringQueueDepth
};

inline constexpr int kMaxUringQueueDepth = 4096;

// Tries to set up a ring; what the kernel takes decides, never its version. Returns null, and one sentence in
// `refusal`, where io_uring cannot be had: a seccomp filter, kernel.io_uring_disabled, an old kernel, a limit, or a
// build without liburing.
//
// Threads: submit(), wait() and the destructor run on one thread, that of the first submit() or wait(): from then on
// the kernel refuses every other (-EEXIST). This function, and registrations before that first call, may run on any
// thread.
//
// Registered buffers: anonymous memory, at most 1 GiB each, huge pages best; they count against RLIMIT_MEMLOCK
// (-ENOMEM) unless the process has CAP_IPC_LOCK. Registered files: -ENOSPC when the table is full. The ring's mappings
// are not inherited by fork(): a child process must not touch the Reader.
std::unique_ptr<Reader> make_uring_reader(const UringOptions& options, std::string* refusal);

}  // namespace weightlift

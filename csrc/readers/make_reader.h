// Which Reader a lane gets: the user's choice, or the best one that this host allows.
#pragma once

#include <memory>
#include <string>

#include "readers/reader.h"

namespace weightlift {

enum class Backend { kAuto, kUring, kPread };

struct ReaderOptions {
  Backend backend = Backend::kAuto;
  int queue_depth;  // reads in flight that storage answers
  int num_threads;  // copies out of the page cache at a time
};

// kAuto: io_uring for direct reads, or threads, with the reason in `fallback`; threads for buffered reads, cached or
// not. These end in a copy, which io_uring makes on the one thread that waits for it, and a destination's pages come
// during it. 0.8 GB into fresh memory, 2 cores, virtio disk: cold, io_uring at most 1.7 GB/s, 8 threads 2.0 to 2.7;
// cached, io_uring at most 2.1, 2 threads 2.3 to 4.5, 8 threads 2.6 to 3.0 (and so no more of them copy than there are
// cores). kUring: io_uring for both, or std::runtime_error with the reason of its refusal. Throws std::system_error
// when threads can't be started.
std::unique_ptr<Reader> make_reader(const ReaderOptions& options, bool direct, std::string* fallback);

}  // namespace weightlift

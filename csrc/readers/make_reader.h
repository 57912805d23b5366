// Which Reader a lane gets: the user's choice, or the best one that this host allows.
#pragma once

#include <memory>
#include <string>

#include "readers/reader.h"

namespace weightlift {

enum class Backend { kAuto, kUring, kPread };

struct ReaderOptions {
  Backend backend = Backend::kAuto;
  int queue_depth;  // reads in flight, direct
  int num_threads;  // of the pread pool, buffered
};

// kAuto: io_uring for direct reads, or threads, with the reason in `fallback`; threads for buffered reads, which are
// copies out of the page cache and want a processor each. kUring: io_uring for both, or std::runtime_error with the
// reason of its refusal. Throws std::system_error when threads can't be started.
std::unique_ptr<Reader> make_reader(const ReaderOptions& options, bool direct, std::string* fallback);

}  // namespace weightlift

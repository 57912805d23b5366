// A pool of threads, each doing one blocking pread(2) at a time: works everywhere, buffered and direct.
#pragma once

#include <memory>

#include "readers/reader.h"

namespace weightlift {

struct PreadOptions {
  int num_waiting;  // reads of storage at a time: each sleeps nearly all the time
  int num_copying;  // reads out of the page cache at a time (ReadRequest::cached), which want a processor each
};

// Starts as many threads as the greater number says (>= 1), named "wl-pread". The queue is deeper than their number:
// what has not begun waits inside. They block every signal, so that signals reach the threads of the program. The
// destructor waits for reads that have begun, drops the others, and joins. Throws std::system_error when a thread
// cannot be started.
std::unique_ptr<Reader> make_pread_reader(const PreadOptions& options);

}  // namespace weightlift

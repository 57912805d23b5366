// A pool of threads, each doing one blocking pread(2) at a time: works everywhere, buffered and direct.
#pragma once

#include <memory>

#include "readers/reader.h"

namespace weightlift {

// Starts `num_threads` (>= 1) threads named "wl-pread". The queue is deeper than their number: what has not begun waits
// inside. They block every signal, so that signals reach the threads of the program. The destructor waits for reads
// that have begun, drops the others, and joins. Throws std::system_error when a thread cannot be started.
std::unique_ptr<Reader> make_pread_reader(int num_threads);

}  // namespace weightlift

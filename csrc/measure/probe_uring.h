// Whether io_uring can be had, and how much of a load's staging memory can be registered with it.
#pragma once

#include <cstdint>
#include <string>

namespace weightlift {

struct UringProbe {
  std::string refusal;         // one sentence: why there is no ring; else empty
  int registered_buffers = 0;  // of those that were asked for
  int error = 0;               // errno of the first one that was refused; 0: none was
};

// Sets up a ring and registers that many buffers with it, in huge pages where they can be had: the memory is taken, and
// locked, for as long as this takes. Throws std::bad_alloc.
UringProbe probe_uring(int queue_depth, int64_t buffer_bytes, int num_buffers);

}  // namespace weightlift

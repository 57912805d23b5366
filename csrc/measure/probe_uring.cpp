#include "measure/probe_uring.h"

#include <cstddef>
#include <memory>

#include "readers/uring_reader.h"
#include "staging/pages.h"

namespace weightlift {

UringProbe probe_uring(int queue_depth, int64_t buffer_bytes, int num_buffers) {
  UringProbe probe;
  HugeMapping staging(buffer_bytes * num_buffers);  // before the ring, which may use it until its own end
  const std::unique_ptr<Reader> ring = make_uring_reader({queue_depth}, &probe.refusal);
  if (ring == nullptr) return probe;
  while (probe.registered_buffers < num_buffers) {
    std::byte* buffer = staging.data() + probe.registered_buffers * buffer_bytes;
    const int index = ring->register_buffer(buffer, static_cast<size_t>(buffer_bytes));
    if (index < 0) {
      probe.error = -index;
      break;
    }
    ++probe.registered_buffers;
  }
  return probe;
}

}  // namespace weightlift

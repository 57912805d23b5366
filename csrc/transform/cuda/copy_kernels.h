// copy_elements() in device memory, for many copies at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan/transfer.h"
#include "transform/op.h"

namespace weightlift {

// What copy_elements() is given (copy.h), with the same meaning, but that `src` and the destination are device memory.
struct DeviceCopy {
  const Transfer* transfer;
  int64_t first;
  int64_t last;
  const std::byte* src;
  int64_t src_file_offset;
};

// Carries out copies whose destinations don't share bytes, in as few launches as they fit, in the stream's order.
// Returns a status: 0, or what the first launch that failed returned. Asynchronous; of `copies` and their transfers
// nothing is referred to afterwards. Fastest where (src - src_file_offset) is a multiple of 16, as accesses are then as
// wide as what is copied is aligned in the file and in memory. Throws std::bad_alloc alone.
int launch_copies(std::span<const DeviceCopy> copies, DeviceStream stream);

}  // namespace weightlift

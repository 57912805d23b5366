// Launching kernels. The core includes this, and knows nothing else of CUDA.
//
// launch.cu, or absent.cpp in a build without CUDA, has launch() for every kernel that there is. The tests of the
// kernels have one that runs them on the host (tests/native/walk_kernels.h).
#pragma once

#include <cstdint>
#include <string>

#include "transform/op.h"

namespace weightlift {

// Queues a kernel on a stream of the calling thread's current device. Does nothing where there are no tiles. Returns a
// status: 0, or a cudaError_t. Never throws.
template <typename K>
int launch(const K& kernel, DeviceStream stream);

// Queues setting bytes to zero.
int launch_zeros(void* memory, int64_t bytes, DeviceStream stream);

// What a status says, and what to do about it where that is known.
std::string describe_device_status(int status);

}  // namespace weightlift

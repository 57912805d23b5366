#include "transform/cuda/launch.h"

#include <cuda_runtime_api.h>

namespace weightlift {

int launch_zeros(void* memory, int64_t bytes, DeviceStream stream) {
  const auto status = cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream));
  if (status != cudaSuccess) cudaGetLastError();  // or the next launch of the thread would be told
  return status;
}

std::string describe_device_status(int status) {
  const auto error = static_cast<cudaError_t>(status);
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

}  // namespace weightlift

#include "staging/cuda_info.h"

#include <cuda_runtime_api.h>

namespace weightlift {

CudaInfo cuda_info() {
  CudaInfo info;
  info.built = true;
  info.architectures = WEIGHTLIFT_CUDA_ARCHITECTURES;
  cudaRuntimeGetVersion(&info.runtime_version);
  cudaDriverGetVersion(&info.driver_version);
  int num_devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&num_devices); error != cudaSuccess) {
    info.error = cudaGetErrorString(error);
    cudaGetLastError();  // or the next one to ask would be told
    return info;
  }
  for (int i = 0; i < num_devices; ++i) {
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, i); error != cudaSuccess) {
      info.error = "device " + std::to_string(i) + ": " + cudaGetErrorString(error);
      cudaGetLastError();
      continue;
    }
    char bus_id[32] = "";
    cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, i);
    info.devices.push_back({.name = properties.name,
                            .pci_bus_id = bus_id,
                            .major = properties.major,
                            .minor = properties.minor,
                            .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)});
  }
  return info;
}

}  // namespace weightlift

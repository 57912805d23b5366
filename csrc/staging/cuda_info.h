// CUDA: whether it is part of this build, and what it finds on this host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weightlift {

struct CudaDevice {
  std::string name;
  std::string pci_bus_id;  // as nvidia-smi writes it, in lower case: "0000:3b:00.0"
  int major = 0;           // compute capability
  int minor = 0;
  int64_t memory_bytes = 0;
};

struct CudaInfo {
  bool built = false;
  std::string architectures;        // what the build has code for, in CMake's words: "80-real 90-real 100"
  int runtime_version = 0;          // of the runtime linked in: 13000 is CUDA 13.0
  int driver_version = 0;           // the latest CUDA that the driver serves; 0: there is no driver
  std::string error;                // in CUDA's words, why there are no devices; else empty
  std::vector<CudaDevice> devices;  // those that CUDA_VISIBLE_DEVICES leaves, in its order
};

// Never throws for what is missing. Starts the driver in this process, which must not fork and go on to use CUDA after
// that, but takes no memory on any device (makes no context).
CudaInfo cuda_info();

}  // namespace weightlift

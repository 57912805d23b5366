// Stands in for the CUDA sources where CUDA is not part of the build.
#include <stdexcept>

#include "staging/cuda_info.h"
#include "staging/device.h"

namespace weightlift {

CudaInfo cuda_info() { return {}; }

std::shared_ptr<Device> make_cuda_device(int32_t) { throw std::runtime_error("this build has no CUDA"); }

}  // namespace weightlift

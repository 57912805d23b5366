// Stands in for the kernels where CUDA is not part of the build.
#include "transform/cuda/copy_kernel.h"
#include "transform/cuda/kernel_lists.h"
#include "transform/cuda/launch.h"
#include "transform/cuda/map_kernel.h"
#include "transform/cuda/marlin_kernel.h"
#include "transform/cuda/quantize_kernel.h"

namespace weightlift {

template <typename K>
int launch(const K&, DeviceStream) {
  return kDeviceNotSupported;
}

int launch_zeros(void*, int64_t, DeviceStream) { return kDeviceNotSupported; }

std::string describe_device_status(int status) {
  return "CUDA is not part of this build of weightlift (status " + std::to_string(status) +
         "): build it where there is an nvcc, with WEIGHTLIFT_CUDA=ON";
}

WEIGHTLIFT_COPY_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)
WEIGHTLIFT_MAP_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)
WEIGHTLIFT_MARLIN_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)
WEIGHTLIFT_QUANTIZE_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)

}  // namespace weightlift

#include "transform/cuda/kernel_lists.h"
#include "transform/cuda/marlin_kernel.h"
#include "transform/cuda/run_kernel.h"

namespace weightlift {

WEIGHTLIFT_MARLIN_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)

}  // namespace weightlift

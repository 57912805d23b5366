#include "transform/cuda/copy_kernel.h"
#include "transform/cuda/kernel_lists.h"
#include "transform/cuda/run_kernel.h"

namespace weightlift {

WEIGHTLIFT_COPY_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)

}  // namespace weightlift

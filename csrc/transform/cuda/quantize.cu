#include "transform/cuda/kernel_lists.h"
#include "transform/cuda/quantize_kernel.h"
#include "transform/cuda/run_kernel.h"

namespace weightlift {

WEIGHTLIFT_QUANTIZE_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)

}  // namespace weightlift

// Compiled by scripts/cuda_check.sh, not run: whatever host and GPU share has to be CUDA code too.
#include "transform/cast.h"
#include "transform/element.h"

using namespace weightlift;

__global__ void convert(const uint32_t* in, uint32_t* out) {
  const uint32_t bits = in[threadIdx.x];
  const auto half = static_cast<uint16_t>(bits);
  out[0] = bfloat16_to_float32(half);
  out[1] = float16_to_float32(half);
  out[2] = float32_to_bfloat16(bits);
  out[3] = float32_to_float16(bits);
  out[4] = float16_to_bfloat16(half);
  out[5] = bfloat16_to_float16(half);
}

static_assert(element_bytes(ElementType::kBFloat16) == 2);

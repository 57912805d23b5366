// Compiled by scripts/cuda_check.sh, not run: whatever host and GPU share has to be CUDA code too.
#include "transform/cast.h"
#include "transform/element.h"
#include "transform/fp8.h"
#include "transform/marlin_layout.h"
#include "transform/quantize_rules.h"

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

// A block for each tile, a thread for each word.
template <int kBits, bool k8BitActivations, PackedLayout kLayout>
__global__ void repack(const uint32_t* in, int64_t row_stride, uint32_t* out) {
  using Tile = MarlinTile<kBits, k8BitActivations>;
  const int64_t k = int64_t{blockIdx.y} * Tile::kRows;
  const int64_t n = int64_t{blockIdx.x} * Tile::kColumns;
  const auto word = [=](int64_t row, int64_t column) { return in[row * row_stride + column]; };
  const int64_t tile = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  out[tile * Tile::kWords + threadIdx.x] = Tile::pack(
      threadIdx.x, [=](int tile_k, int tile_n) { return packed_value<kBits, kLayout>(word, k + tile_k, n + tile_n); });
}
template __global__ void repack<4, false, PackedLayout::kGptq>(const uint32_t*, int64_t, uint32_t*);
template __global__ void repack<4, true, PackedLayout::kAwq>(const uint32_t*, int64_t, uint32_t*);
template __global__ void repack<8, false, PackedLayout::kNMajor>(const uint32_t*, int64_t, uint32_t*);
template __global__ void repack<8, true, PackedLayout::kAwq>(const uint32_t*, int64_t, uint32_t*);

__global__ void convert_fp8(const uint8_t* in, uint8_t* out, float scale, float inverse, uint32_t limit_bits) {
  const uint8_t byte = in[threadIdx.x];
  out[0] = e4m3fn_to_e4m3fnuz(byte, true);
  out[1] = requantize_fp8<Fp8::kE4M3FN>(byte, scale, inverse, limit_bits, Rounding::kExact);
  out[2] = requantize_fp8<Fp8::kE4M3FNUZ>(byte, scale, inverse, limit_bits, Rounding::kThroughFp16);
}

__global__ void quantize(const float* in, uint8_t* out, ScaleRule rule, float amax, bool keep_nan) {
  const float scale = scale_from_amax(rule, amax);
  const float scaled = in[threadIdx.x] * scaling_factor(Scaling::kMultiply, scale, !keep_nan);
  const uint32_t bits = internal::bits_from_float(scaled);
  const uint32_t limit_bits = internal::bits_from_float(rule.max_value);
  out[0] =
      quantized<QuantizedType::kE4M3FN>(bits, limit_bits, quantized_nan(QuantizedType::kE4M3FN, limit_bits, keep_nan));
  out[1] = quantized<QuantizedType::kE4M3FNUZ>(bits, limit_bits,
                                               quantized_nan(QuantizedType::kE4M3FNUZ, limit_bits, keep_nan));
  out[2] = quantized<QuantizedType::kInt8>(bits, limit_bits, quantized_nan(QuantizedType::kInt8, limit_bits, keep_nan));
  out[3] = float32_to_e8m0_up(bits);
}

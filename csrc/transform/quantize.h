// Floats to 8 bits: a scale for each block of the matrix, found in the block or given.
//
// Infinity and NaN take no part in finding a scale. Infinity becomes the largest number; see Quantize::keep_nan.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transform/element.h"
#include "transform/op.h"
#include "transform/quantize_rules.h"

namespace weightlift {

struct Quantize {
  ElementType src_type = ElementType::kFloat32;  // float32, float16 or bfloat16
  QuantizedType type{};
  int64_t rows = 0;  // of the source
  int64_t columns = 0;
  int64_t block_rows = 1;  // of a block; those at the lower and right edge may have less
  int64_t block_columns = 1;
  Scaling scaling{};
  float limit = 448;  // the largest magnitude of the result
  // NaN stays NaN (zero in int8, which has none), and an all-zero block with scale 0 stays zero. Otherwise both become
  // the limit, as in CUDA kernels that clamp with fminf.
  bool keep_nan = true;
};

// Scales that are found: outputs are the weight, bytes, and the scales, one row for each row of blocks: float32, or
// with `e8m0_scales` bytes, the exponents of powers of two. Granule: a row of blocks. Throws std::invalid_argument:
// sizes that don't fit, another source type.
//
// device_amaxes: for launch(), device memory of a float32 for each block, which the op refers to and writes. With it,
// the whole GPU works on a block; without it, one multiprocessor does, which is right for small blocks.
std::unique_ptr<const Op> make_quantize(const Quantize& quantize, const ScaleRule& rule, bool e8m0_scales,
                                        OpOutput weight, OpOutput scales, float* device_amaxes = nullptr);

// Scales that are given, row by row of blocks. Output: the weight. Granule: one row.
// Throws std::invalid_argument: another number of scales than of blocks, sizes that don't fit, another source type.
std::unique_ptr<const Op> make_quantize_with(const Quantize& quantize, std::vector<float> scales, OpOutput weight);

// The same with scales that are read when the op runs, and that it refers to: they lie in the same memory as the
// output.
std::unique_ptr<const Op> make_quantize_with(const Quantize& quantize, const float* scales, OpOutput weight);

// The largest finite magnitude of all rows, put into `*amax`, a float32 at a multiple of 4 bytes, where that is smaller
// than it; so several ops may share one. Granule: one row.
std::unique_ptr<const Op> make_amax(ElementType src_type, int64_t rows, int64_t columns, float* amax);

}  // namespace weightlift

// Quantised weights of a checkpoint, brought into the layout of the Marlin kernels: see marlin_layout.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transform/marlin_layout.h"
#include "transform/op.h"

namespace weightlift {

struct MarlinRepack {
  PackedLayout layout{};
  int num_bits = 4;  // 4 or 8
  bool is_a_8bit = false;
  int64_t size_k = 0;  // of the source, in values
  int64_t size_n = 0;
  // Of the output, at least those of the source; zeros fill up. Multiples of the tile: 16 x 64, 32 x 32 with is_a_8bit.
  int64_t padded_k = 0;
  int64_t padded_n = 0;
  // Row k of the output is row perm[k] of the source (act-order); empty: in order. kGptq without padding only.
  std::vector<int32_t> perm;
  // For launch(), the same in device memory, which the op refers to. There, entries outside of [0, size_k) give zeros.
  // It may be given without `perm`: run() is not to be called then.
  const int32_t* device_perm = nullptr;
};

// The source: rows of 32-bit words as the layout says. The output: one row per row of tiles, each the tiles' words.
// Granule: what one row of tiles needs, kGptq: 16 k (2 packed rows of 4 bits, 4 of 8 bits), kAwq: 16 rows; kNMajor: the
// rows of one column of tiles, 64; with is_a_8bit 32 in each case; with perm the whole source.
// Throws std::invalid_argument: sizes that don't fit.
std::unique_ptr<const Op> make_marlin_repack(MarlinRepack repack, OpOutput output);

}  // namespace weightlift

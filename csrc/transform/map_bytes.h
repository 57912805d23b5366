// Bytes replaced through tables: what an 8-bit float becomes in another format, or under another scale.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "transform/fp8.h"
#include "transform/op.h"

namespace weightlift {

using ByteTable = std::array<uint8_t, 256>;

// fp8.h's functions of one byte, as tables.
ByteTable e4m3fn_to_e4m3fnuz_table(bool keep_nan);
ByteTable requantize_table(Fp8 format, float scale, float new_scale, float limit, Rounding rounding);

// Rows up to `end_row` (from where the part before ends) go through `table`.
struct ByteMapPart {
  int64_t end_row;
  ByteTable table;
};

// The source: rows of bytes. The output: as many rows of the same size. Granule: one row.
// Throws std::invalid_argument: parts that don't ascend to the last row, an output of another size.
std::unique_ptr<const Op> make_byte_map(const std::vector<ByteMapPart>& parts, int64_t row_bytes, OpOutput output);

// A weight whose parts end at `end_rows` under the largest of their scales, where the scales are read when the op runs:
// `scales`, one for each part, which it refers to, in the same memory as the output. See requantized() for what becomes
// of scales that are none. Granule: one row. Throws as make_byte_map().
struct Requantize {
  Fp8 format{};  // kE4M3FN or kE4M3FNUZ
  Rounding rounding{};
  float limit = 448;
  float unset = -448;
};
std::unique_ptr<const Op> make_requantize(const Requantize& requantize, std::vector<int64_t> end_rows,
                                          const float* scales, int64_t row_bytes, OpOutput output);

}  // namespace weightlift

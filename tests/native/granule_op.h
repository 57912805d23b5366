// An op for tests, whose result shows whether each granule came whole, in order, and once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "transform/op.h"

namespace weightlift {

// Of each granule one row: byte j is added up over its rows, row i times 2 i + 1, to what the output holds. Zeros there
// at first show a granule that is run twice.
class GranuleOp final : public Op {
 public:
  GranuleOp(OpSource source, std::byte* data, int64_t row_stride)
      : Op(source,
           {{data, (source.num_rows + source.granule_rows - 1) / source.granule_rows, source.row_bytes, row_stride}}) {}

  // The same with another output.
  std::shared_ptr<const GranuleOp> onto(std::byte* data) const {
    return std::make_shared<GranuleOp>(source(), data, outputs().front().row_stride);
  }

  const char* name() const override { return "granule"; }

  void run(const std::byte* src, int64_t src_row_stride, int64_t first_row, int64_t num_rows) const override {
    const OpOutput& output = outputs().front();
    const int64_t end = first_row + num_rows;
    if (first_row % source().granule_rows != 0 || num_rows <= 0 ||
        (end % source().granule_rows != 0 && end != source().num_rows)) {
      std::fprintf(stderr, "GranuleOp: a granule came in parts\n");
      std::abort();
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t place = (first_row + row) % source().granule_rows;
      std::byte* out = output.data + (first_row + row) / source().granule_rows * output.row_stride;
      for (int64_t j = 0; j < source().row_bytes; ++j) {
        out[j] = static_cast<std::byte>(static_cast<int64_t>(out[j]) +
                                        (2 * place + 1) * static_cast<int64_t>(src[row * src_row_stride + j]));
      }
    }
  }
};

}  // namespace weightlift

#include "staging/carry_out.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "plan/geometry.h"
#include "transform/copy.h"

namespace weightlift {

OpRows rows_of(const Plan& plan, const Piece& piece, std::byte* staging) {
  const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
  const std::span<const Read> reads(&plan.reads[static_cast<size_t>(piece.read)], static_cast<size_t>(piece.num_reads));
  const int64_t row_bytes = transfer.op->source().row_bytes;
  const int64_t num_rows = (piece.last - piece.first) / row_bytes;
  const auto begin_of = [&](int64_t row) {
    return transfer.src_offset + source_byte(transfer, piece.first + row * row_bytes);
  };
  const auto landed = [&](int64_t offset, const Read& read) {
    return staging + read.staging_offset + (offset - read.offset);
  };
  std::byte* rows = landed(begin_of(0), reads.front());
  int64_t row_stride = num_rows > 1 ? source_byte(transfer, row_bytes) : row_bytes;
  const auto shift = [](const Read& read) { return read.offset - read.staging_offset; };
  const bool lie_as_in_file =
      std::ranges::all_of(reads, [&](const Read& read) { return shift(read) == shift(reads.front()); });
  if (!lie_as_in_file) {
    // Each row was read on its own, for this op alone, and they lie in order: they can close up.
    auto read = reads.begin();
    for (int64_t row = 1; row < num_rows; ++row) {
      while (read->needed_end <= begin_of(row)) ++read;  // those of the row before
      std::memmove(rows + row * row_bytes, landed(begin_of(row), *read), static_cast<size_t>(row_bytes));
    }
    row_stride = row_bytes;
  }
  return {rows, row_stride, piece.first / row_bytes, num_rows};
}

void carry_out(const Plan& plan, const Piece& piece, std::byte* staging) {
  const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
  const Read& read = plan.reads[static_cast<size_t>(piece.read)];
  if (transfer.op) {
    const OpRows rows = rows_of(plan, piece, staging);
    transfer.op->run(rows.data, rows.stride, rows.first, rows.count);
  } else {
    copy_elements(transfer, piece.first, piece.last, staging + read.staging_offset, read.offset);
  }
}

}  // namespace weightlift

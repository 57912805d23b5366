#include "staging/carry_out.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "plan/geometry.h"
#include "transform/copy.h"

namespace weightlift {

namespace {

// The source rows of a piece of an op, as its reads have brought them into staging.
class LandedRows {
 public:
  LandedRows(const Plan& plan, const Piece& piece, std::byte* staging)
      : transfer_(plan.transfers[static_cast<size_t>(piece.transfer)]),
        reads_(&plan.reads[static_cast<size_t>(piece.read)], static_cast<size_t>(piece.num_reads)),
        first_(piece.first),
        row_bytes_(transfer_.op->source().row_bytes),
        count_((piece.last - piece.first) / row_bytes_),
        staging_(staging) {}

  // Otherwise each row was read on its own, for this op alone, and they lie in order.
  bool lie_as_in_file() const {
    const auto shift = [](const Read& read) { return read.offset - read.staging_offset; };
    return std::ranges::all_of(reads_, [&](const Read& read) { return shift(read) == shift(reads_.front()); });
  }
  std::byte* begin() const { return landed(begin_of(0), reads_.front()); }
  OpRows rows() const {
    const int64_t stride = lie_as_in_file() && count_ > 1 ? source_byte(transfer_, row_bytes_) : row_bytes_;
    return {begin(), stride, first_ / row_bytes_, count_};
  }
  void close_up() const {
    auto read = reads_.begin();
    for (int64_t row = 1; row < count_; ++row) {
      while (read->needed_end <= begin_of(row)) ++read;  // those of the row before
      std::memmove(begin() + row * row_bytes_, landed(begin_of(row), *read), static_cast<size_t>(row_bytes_));
    }
  }

 private:
  int64_t begin_of(int64_t row) const {
    return transfer_.src_offset + source_byte(transfer_, first_ + row * row_bytes_);
  }
  std::byte* landed(int64_t offset, const Read& read) const {
    return staging_ + read.staging_offset + (offset - read.offset);
  }

  const Transfer& transfer_;
  const std::span<const Read> reads_;
  const int64_t first_;
  const int64_t row_bytes_;
  const int64_t count_;
  std::byte* const staging_;
};

}  // namespace

void align_rows(const Plan& plan, const Piece& piece, std::byte* staging) {
  const LandedRows rows(plan, piece, staging);
  if (!rows.lie_as_in_file()) rows.close_up();
}

OpRows rows_of(const Plan& plan, const Piece& piece, std::byte* staging) {
  return LandedRows(plan, piece, staging).rows();
}

void carry_out(const Plan& plan, const Piece& piece, std::byte* staging) {
  const Transfer& transfer = plan.transfers[static_cast<size_t>(piece.transfer)];
  const Read& read = plan.reads[static_cast<size_t>(piece.read)];
  if (transfer.op) {
    align_rows(plan, piece, staging);
    const OpRows rows = rows_of(plan, piece, staging);
    transfer.op->run(rows.data, rows.stride, rows.first, rows.count);
  } else {
    copy_elements(transfer, piece.first, piece.last, staging + read.staging_offset, read.offset);
  }
}

}  // namespace weightlift

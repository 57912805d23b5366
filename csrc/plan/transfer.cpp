#include "plan/transfer.h"

#include <stdexcept>
#include <utility>

#include "plan/geometry.h"

namespace weightlift {

Transfer make_transfer(int64_t id, int32_t file, ElementType src_type, int64_t src_offset, ElementType dst_type,
                       std::byte* dst, std::vector<Dim> dims, int32_t device) {
  Transfer transfer{id, file, src_type, dst_type, src_offset, dst, std::move(dims), nullptr, device};
  const int64_t src_item = element_bytes(src_type);
  canonicalise(transfer.dims);
  const bool contiguous =
      transfer.dims.empty() ||
      (transfer.dims.size() == 1 && transfer.dims[0].src_stride == src_item && transfer.dims[0].dst_stride == src_item);
  if (src_type == dst_type && contiguous) {
    transfer.dims = {{transfer.num_elements() * src_item, 1, 1}};
    transfer.src_type = transfer.dst_type = ElementType::kBytes1;
  }
  return transfer;
}

Transfer make_op_transfer(int64_t id, int32_t file, int64_t src_offset, int64_t src_row_stride,
                          std::shared_ptr<const Op> op, int32_t device) {
  const auto overlapping = [](int64_t num_rows, int64_t row_bytes, int64_t row_stride) {
    return num_rows > 1 && row_stride < row_bytes;
  };
  if (!op || op->outputs().size() != 1) throw std::invalid_argument("a recorded op has one output");
  const OpSource& source = op->source();
  const OpOutput& output = op->outputs().front();
  if (overlapping(source.num_rows, source.row_bytes, src_row_stride) ||
      overlapping(output.num_rows, output.row_bytes, output.row_stride)) {
    throw std::invalid_argument("the rows of an op must not overlap");
  }
  Transfer transfer =
      make_transfer(id, file, ElementType::kBytes1, src_offset, ElementType::kBytes1, output.data,
                    {{source.num_rows, src_row_stride, source.row_bytes}, {source.row_bytes, 1, 1}}, device);
  transfer.op = std::move(op);
  return transfer;
}

}  // namespace weightlift

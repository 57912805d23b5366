#include "plan/transfer.h"

#include <utility>

#include "plan/geometry.h"

namespace weightlift {

Transfer make_transfer(int64_t id, int32_t file, ElementType src_type, int64_t src_offset, ElementType dst_type,
                       std::byte* dst, std::vector<Dim> dims) {
  Transfer transfer{id, file, src_type, dst_type, src_offset, dst, std::move(dims)};
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

}  // namespace weightlift

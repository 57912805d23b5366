// The transform that every load needs: move elements from bytes read to their place in memory, converting numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/transfer.h"

namespace weightlift {

// Carries out a part of a transfer: elements [first, last), counted in source order. `src` points at the byte of the
// file with offset `src_file_offset`; all bytes that those elements need must lie behind it at their distances in the
// file. Neither side needs any alignment. Different parts may be carried out by different threads at once. Numbers are
// converted as torch's copy_ does (cast.h). REQUIRES: canonical transfer, can_convert() its types, 0 <= first <= last
// <= num_elements().
void copy_elements(const Transfer& transfer, int64_t first, int64_t last, const std::byte* src,
                   int64_t src_file_offset);

}  // namespace weightlift

// Rounding to alignments: the one place where it is done.
#pragma once

#include <cstdint>

namespace weightlift {

// Largest multiple of `alignment` that is <= value. REQUIRES: value >= 0, alignment > 0 (any number, not only powers of
// two).
constexpr int64_t align_down(int64_t value, int64_t alignment) { return value - value % alignment; }

// Smallest multiple of `alignment` that is >= value. REQUIRES: as align_down, and no overflow.
constexpr int64_t align_up(int64_t value, int64_t alignment) { return align_down(value + alignment - 1, alignment); }

constexpr bool is_aligned(int64_t value, int64_t alignment) { return value % alignment == 0; }

}  // namespace weightlift

// What is done with bytes that have landed: the copies and ops that a plan's pieces stand for.
#pragma once

#include <cstddef>

#include "plan/planner.h"

namespace weightlift {

// Carries out a piece whose reads have landed in `staging`, the memory of its chunk. Bytes of an op's reads may be
// moved there. Threads: pieces of different chunks at once, those of one chunk one at a time.
void carry_out(const Plan& plan, const Piece& piece, std::byte* staging);

}  // namespace weightlift

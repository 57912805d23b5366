// What is done with bytes that have landed: the copies and ops that a plan's pieces stand for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/planner.h"

namespace weightlift {

// Where the source rows of a piece of an op are.
struct OpRows {
  std::byte* data;
  int64_t stride;  // bytes from one to the next
  int64_t first;
  int64_t count;
};

// Of a piece of an op whose reads have landed in `staging`, the memory of its chunk: has its rows lie at one stride, by
// moving those that were read each on its own. Once, before rows_of(), and before anything of the chunk is carried out
// that goes on later, as on a GPU: what that copies may span these rows.
void align_rows(const Plan& plan, const Piece& piece, std::byte* staging);
OpRows rows_of(const Plan& plan, const Piece& piece, std::byte* staging);

// Carries out a piece whose reads have landed in `staging`, the memory of its chunk. Bytes of an op's reads may be
// moved there. Threads: pieces of different chunks at once, those of one chunk one at a time.
void carry_out(const Plan& plan, const Piece& piece, std::byte* staging);

}  // namespace weightlift

// Planner: turns transfers into reads.
//
// In: transfers whose destinations are disjoint. Out: reads in file order, grouped into chunks; each chunk is what one
// staging buffer holds, or one read straight into a destination.
//
// Which bytes are read: those that some transfer needs, and gaps between them of at most `merge_gap_bytes`, because a
// read of its own costs as much as that many bytes more of a running one. The same rule decides for a strided source
// between its pieces and the whole span, dimension by dimension from the inside. Direct reads are widened to the file's
// alignment.
//
// Where other processes of the machine load from the same files, what they read too is not read past the page cache, so
// that storage gives it once: see SharedReads.
//
// Transfers that follow one another in the file as in memory share reads in place: what is laid out like its file costs
// as many reads as one tensor of that size.
//
// Into a GPU's memory nothing is read in place: all of it goes through staging.
//
// The source of an op is cut at its granules: all bytes of a granule arrive in one chunk, which grows beyond
// `chunk_bytes` where a single granule is larger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "plan/geometry.h"
#include "plan/transfer.h"

namespace weightlift {

// How a range of a file shall be read.
struct ReadMode {
  bool direct = false;           // bypassing the page cache
  int64_t offset_alignment = 1;  // of file offsets and lengths; 1 when not direct
  int64_t memory_alignment = 1;  // of buffers
  bool cached = false;           // out of the page cache, where nearly all of it is
  bool operator==(const ReadMode&) const = default;
};

// What other processes of this machine, which load from the same files at the same time, read as well, beside what can
// be seen from the transfers: that others need the bytes that are read along between the pieces of one.
struct SharedReads {
  struct Tensor {
    int32_t file;
    ByteRange bytes;
  };
  std::vector<Tensor> tensors;  // that others read too, if all of their bytes are needed here
};

struct PlanOptions {
  int64_t chunk_bytes = 0;      // most bytes of one read, and of one chunk but for large granules; a multiple of every
                                // alignment and of 4096
  int64_t merge_gap_bytes = 0;  // see above
  // The way to read [begin, end) of a file; asked for windows of kModeWindow bytes.
  std::function<ReadMode(int32_t file, ByteRange window)> mode_of;
  // Unset: no other process reads along.
  std::optional<SharedReads> shared;
  // Whether this memory, of one or of several neighbouring destinations, shall be prepared: it is untouched, and may be
  // given huge pages. Direct reads go in place only into prepared memory. Without: none is.
  std::function<bool(ByteRange)> can_prepare;
};

// Page-cache residency is asked for, and decides the mode, in windows of this size.
inline constexpr int64_t kModeWindow = int64_t{8} << 20;
// A shorter stretch is not worth a read of its own beside the staging buffers.
inline constexpr int64_t kMinInPlaceBytes = int64_t{64} << 10;
// Destination memory from this size on is prepared: given huge pages, which are made ready ahead of direct reads.
// Buffered reads are copies by the processor: whoever copies may as well bring the pages, and does so on every core at
// once. Destinations that lie side by side, as the experts of a fused parameter do, count together.
inline constexpr int64_t kMinPrepareBytes = int64_t{4} << 20;
// In steps of this size, aligned to it.
inline constexpr int64_t kPrepareStep = int64_t{16} << 20;

struct Read {
  int32_t file;
  int64_t offset;          // as submitted
  int64_t length;          // as submitted: may reach past the end of the file (direct), then it comes back short
  int64_t needed_end;      // the read is complete when the bytes up to here have arrived
  std::byte* destination;  // in place; nullptr: into the chunk's staging buffer
  int64_t staging_offset;  // there
  int64_t transfer_id;     // of its first transfer, to name it in an error
};

// Elements [first, last) of a transfer, in source order, arrive with this read and those behind it in the plan.
struct Piece {
  int32_t transfer;  // position in Plan::transfers
  int32_t read;      // position in Plan::reads, of the first
  int64_t first;
  int64_t last;
  int32_t num_reads = 1;
};

struct Chunk {
  int32_t first_read;
  int32_t num_reads;
  int64_t first_piece;
  int64_t num_pieces;     // 0: in place
  int64_t staging_bytes;  // 0: in place
  bool direct;
  bool cached;          // see ReadMode
  int32_t preparation;  // in place: position in Plan::preparations of the step to wait for; -1: none
};

struct Plan {
  std::vector<Transfer> transfers;
  std::vector<Read> reads;
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;            // in file order
  std::vector<ByteRange> preparations;  // destination memory to make ready ahead of direct reads, in the order of need
  std::vector<ByteRange> advised;       // destination memory to give huge pages to when it is written
  int64_t bytes_needed = 0;             // distinct bytes of files that the transfers ask for
  int64_t bytes_read = 0;               // what the reads fetch: their lengths as submitted
  int64_t num_whole_ops = 0;            // ops that need their whole source at once, and a chunk larger than others
  int64_t whole_op_bytes = 0;           // of the largest such chunk
};

// REQUIRES: transfers canonical, source_is_nested(), destinations disjoint; options.mode_of set. Throws nothing but
// std::bad_alloc and what the callbacks throw.
Plan plan_reads(std::vector<Transfer> transfers, const PlanOptions& options);

}  // namespace weightlift

// Kernel: how the kernels are written, so that a machine without a GPU runs every thread of them.
//
// A kernel is a struct of parameters, handed over by value. Its work comes in tiles, each done by a block of kThreads
// threads, in phases; between two phases, all threads of a block meet. What a thread does in a phase is a function for
// host and device. On a GPU each block takes tiles in turn (run_kernel.h); tests walk through all blocks, tiles, phases
// and threads on the host, and compare what comes out with Op::run (tests/native/walk_kernels.h).
//
//   struct SomeKernel : Kernel {
//     static constexpr int kPhases;
//     static constexpr int kMinBlocks;  // that a multiprocessor is to hold at a time, at least: bounds registers
//     int64_t tiles() const;
//     struct Shared;  // memory of a block, of any content at first
//     struct Thread;  // what a thread keeps from phase to phase of a tile
//     static constexpr int kPreparations;
//     template <int kPhase> void prepare(int thread, Shared&) const;  // each once for a block, before its first tile
//     template <int kPhase> void run(int64_t tile, int thread, Thread&, Shared&) const;
//     void finish(int thread, Shared&) const;   // once for each block, after its last tile
//   };
//
// Sums and products are rounded one by one: files with kernels are compiled without contraction (--fmad=false), with
// subnormal numbers and exact division, which are the compiler's defaults.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transform/cuda/access.h"

namespace weightlift {

inline constexpr int kThreads = 256;  // of a block

// What a kernel leaves away.
struct Kernel {
  struct Shared {};
  struct Thread {};
  static constexpr int kPreparations = 0;
  static constexpr int kMinBlocks = 3;
  template <typename AnyShared>
  WEIGHTLIFT_HOST_DEVICE void finish(int, AnyShared&) const {}
};

// ---- division by numbers that are known at launch

// n / divisor in three instructions, for n and divisor below 2^31 (Granlund and Montgomery, "Division by invariant
// integers using multiplication", 1994).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor_)) / divisor_ + 1);
  }

  WEIGHTLIFT_HOST_DEVICE uint32_t value() const { return divisor_; }
  WEIGHTLIFT_HOST_DEVICE uint32_t divide(uint32_t n) const {
    const auto high = static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier_ >> 32);
    return (high + n) >> shift_;
  }
  WEIGHTLIFT_HOST_DEVICE uint32_t modulo(uint32_t n) const { return n - divide(n) * divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 1;
  uint32_t shift_ = 0;
};

// ---- a plane of rows, each of so many units of work, cut into tiles

// A unit is what a thread does at once, neighbouring units neighbouring threads. Whole rows share a tile where they are
// short.
struct RowTiles {
  static constexpr int kUnitsOfThread = 4;
  static constexpr int64_t kUnits = int64_t{kUnitsOfThread} * kThreads;  // of a tile, at most

  int64_t rows = 0;
  int64_t units = 0;   // of a row
  int64_t across = 1;  // tiles beside each other
  Divisor tile_units;
  int64_t tile_rows = 1;

  RowTiles() = default;
  RowTiles(int64_t num_rows, int64_t num_units) : rows(num_rows), units(num_units) {
    across = (units + kUnits - 1) / kUnits;
    const int64_t width = (units + across - 1) / across;
    tile_units = Divisor(width);
    tile_rows = kUnits / width;
  }

  int64_t tiles() const { return (rows + tile_rows - 1) / tile_rows * across; }

  // Calls visit(row, unit) for what a thread has of a tile.
  template <typename Visit>
  WEIGHTLIFT_HOST_DEVICE void visit(int64_t tile, int thread, const Visit& visit) const {
    const int64_t down = tile / across;
    const int64_t first_row = down * tile_rows;
    const int64_t first_unit = (tile - down * across) * tile_units.value();
    WEIGHTLIFT_UNROLL
    for (int i = 0; i < kUnitsOfThread; ++i) {
      const auto local = static_cast<uint32_t>(i * kThreads + thread);
      const uint32_t row = tile_units.divide(local);
      const int64_t unit = first_unit + (local - row * tile_units.value());
      if (row < tile_rows && first_row + row < rows && unit < units) visit(first_row + row, unit);
    }
  }
};

// ---- maxima among threads

// Raises memory of a block, or of all, to `bits`.
WEIGHTLIFT_HOST_DEVICE inline void raise_to(uint32_t* memory, uint32_t bits) {
#ifdef __CUDA_ARCH__
  atomicMax(memory, bits);
#else
  if (*memory < bits) *memory = bits;
#endif
}

// The same, called by all threads of a block at once, with the same memory.
WEIGHTLIFT_HOST_DEVICE inline void raise_together(uint32_t* memory, uint32_t bits, int thread) {
#ifdef __CUDA_ARCH__
  bits = __reduce_max_sync(0xffffffff, bits);
  if (thread % 32 == 0) atomicMax(memory, bits);
#else
  (void)thread;
  raise_to(memory, bits);
#endif
}

}  // namespace weightlift

// The kernels of byte maps: bytes replaced through a table, which is given, or made on the device of scales that are
// there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transform/cuda/access.h"
#include "transform/cuda/kernel.h"
#include "transform/map_bytes.h"

namespace weightlift {

// A table as a parameter: std::array's functions are the host's.
struct GivenTable {
  uint8_t bytes[256];
};
WEIGHTLIFT_HOST_DEVICE inline uint8_t table_entry(const GivenTable& table, uint8_t byte) { return table.bytes[byte]; }
WEIGHTLIFT_HOST_DEVICE inline uint8_t table_entry(const RequantizeRule& rule, uint8_t byte) {
  return requantized(rule, byte);
}

template <typename Table>
struct MapKernel : Kernel {
  static constexpr int kPreparations = 2;
  static constexpr int kPhases = 1;
  static constexpr int kBanks = 32;

  // The table, and a copy of it in each bank, four entries to a word: each thread of a warp has one to itself, so that
  // all look up at once, whatever they look for.
  struct Shared {
    uint8_t table[256];
    alignas(4) uint8_t banks[64 * kBanks * 4];
  };

  const std::byte* src;
  std::byte* dst;
  int64_t src_row_stride;
  int64_t dst_row_stride;
  int64_t row_bytes;
  RowTiles tiles_of;  // units of 16 bytes
  int32_t src_alignment;
  int32_t dst_alignment;
  Table table;

  int64_t tiles() const { return tiles_of.tiles(); }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void prepare(int thread, Shared& shared) const {
    if constexpr (kPhase == 0) {
      shared.table[thread] = table_entry(table, static_cast<uint8_t>(thread));
    } else {
      for (int word = thread; word < 64 * kBanks; word += kThreads) {
        for (int i = 0; i < 4; ++i) shared.banks[4 * word + i] = shared.table[word / kBanks * 4 + i];
      }
    }
  }

  template <int kPhase>
  WEIGHTLIFT_HOST_DEVICE void run(int64_t tile, int thread, Thread&, Shared& shared) const {
    const int bank = 4 * (thread % kBanks);
    tiles_of.visit(tile, thread, [&](int64_t row, int64_t unit) {
      const std::byte* from = src + row * src_row_stride + 16 * unit;
      std::byte* to = dst + row * dst_row_stride + 16 * unit;
      const int64_t bytes = row_bytes - 16 * unit;
      uint32_t words[4];
      if (bytes >= 16) {
        load16(from, src_alignment, words);
      } else {
        load_some(from, bytes, words);
      }
      WEIGHTLIFT_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t mapped = 0;
        WEIGHTLIFT_UNROLL
        for (int byte = 0; byte < 4; ++byte) {
          const uint32_t index = words[i] >> (8 * byte) & 0xff;
          mapped |= uint32_t{shared.banks[(index & 0xfc) * kBanks + bank + (index & 3)]} << (8 * byte);
        }
        words[i] = mapped;
      }
      if (bytes >= 16) {
        store16(to, dst_alignment, words);
      } else {
        store_some(to, bytes, words);
      }
    });
  }
};

}  // namespace weightlift

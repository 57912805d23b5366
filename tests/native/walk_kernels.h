// launch() for tests: runs kernels on the host, at once, thread for thread, and so in memory of the host.
//
// It takes the place of the core's. Blocks run in any order, each with tiles as a GPU would hand them out; in a phase,
// threads run in any order; a block's memory holds anything at first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "transform/cuda/copy_kernel.h"
#include "transform/cuda/kernel_lists.h"
#include "transform/cuda/launch.h"
#include "transform/cuda/map_kernel.h"
#include "transform/cuda/marlin_kernel.h"
#include "transform/cuda/quantize_kernel.h"

namespace weightlift {

// What the next launches return, after which nothing is run; 0: they run.
inline int failing_status = 0;
inline int num_launches = 0;

namespace internal {

inline std::mt19937& walking_random() {
  static std::mt19937 random(7);
  return random;
}

template <typename Visit>
void for_threads(const Visit& visit) {
  std::vector<int> threads(kThreads);
  std::iota(threads.begin(), threads.end(), 0);
  // Any order shows what threads take from each other within a phase; a full shuffle of each takes too long.
  std::ranges::rotate(threads, threads.begin() + static_cast<int>(walking_random()() % kThreads));
  if (walking_random()() % 2 != 0) std::ranges::reverse(threads);
  for (const int thread : threads) visit(thread);
}

template <int kPhase, typename K>
void walk_preparations(const K& kernel, typename K::Shared& shared) {
  if constexpr (kPhase < K::kPreparations) {
    for_threads([&](int thread) { kernel.template prepare<kPhase>(thread, shared); });
    walk_preparations<kPhase + 1>(kernel, shared);
  }
}

template <int kPhase, typename K>
void walk_phases(const K& kernel, int64_t tile, std::vector<typename K::Thread>& own, typename K::Shared& shared) {
  if constexpr (kPhase < K::kPhases) {
    for_threads(
        [&](int thread) { kernel.template run<kPhase>(tile, thread, own[static_cast<size_t>(thread)], shared); });
    walk_phases<kPhase + 1>(kernel, tile, own, shared);
  }
}

}  // namespace internal

template <typename K>
int launch(const K& kernel, DeviceStream) {
  ++num_launches;
  if (failing_status != 0) return failing_status;
  const int64_t tiles = kernel.tiles();
  std::vector<int64_t> blocks(static_cast<size_t>(std::min<int64_t>(tiles, 1 + internal::walking_random()() % 5)));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::ranges::shuffle(blocks, internal::walking_random());
  for (const int64_t block : blocks) {
    const auto shared = std::make_unique<typename K::Shared>();
    std::memset(static_cast<void*>(shared.get()), 0xa5, sizeof(*shared));
    internal::walk_preparations<0>(kernel, *shared);
    for (int64_t tile = block; tile < tiles; tile += static_cast<int64_t>(blocks.size())) {
      std::vector<typename K::Thread> own(kThreads);
      internal::walk_phases<0>(kernel, tile, own, *shared);
    }
    internal::for_threads([&](int thread) { kernel.finish(thread, *shared); });
  }
  return 0;
}

int launch_zeros(void* memory, int64_t bytes, DeviceStream) {
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return failing_status;
}

std::string describe_device_status(int status) { return std::to_string(status); }

WEIGHTLIFT_COPY_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)
WEIGHTLIFT_MAP_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)
WEIGHTLIFT_MARLIN_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)
WEIGHTLIFT_QUANTIZE_KERNELS(WEIGHTLIFT_INSTANTIATE_LAUNCH)

}  // namespace weightlift

// launch() by CUDA. Included by the .cu files, each of which instantiates it for its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "transform/cuda/kernel.h"
#include "transform/cuda/launch.h"

namespace weightlift {

template <int kPhase, typename K>
__device__ void run_phases(const K& kernel, int64_t tile, typename K::Thread& own, typename K::Shared& shared) {
  kernel.template run<kPhase>(tile, static_cast<int>(threadIdx.x), own, shared);
  if constexpr (kPhase + 1 < K::kPhases) {
    __syncthreads();
    run_phases<kPhase + 1>(kernel, tile, own, shared);
  }
}

template <int kPhase, typename K>
__device__ void run_preparations(const K& kernel, typename K::Shared& shared) {
  if constexpr (kPhase < K::kPreparations) {
    kernel.template prepare<kPhase>(static_cast<int>(threadIdx.x), shared);
    __syncthreads();
    run_preparations<kPhase + 1>(kernel, shared);
  }
}

template <typename K>
__global__ void __launch_bounds__(kThreads, K::kMinBlocks) run_kernel(const __grid_constant__ K kernel, int64_t tiles) {
  __shared__ typename K::Shared shared;
  run_preparations<0>(kernel, shared);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    typename K::Thread own;
    run_phases<0>(kernel, tile, own, shared);
    __syncthreads();
  }
  kernel.finish(static_cast<int>(threadIdx.x), shared);
}

template <typename K>
int launch(const K& kernel, DeviceStream stream) {
  const int64_t tiles = kernel.tiles();
  if (tiles == 0) return cudaSuccess;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) return status;
  // Twice as many blocks as a multiprocessor holds at a time: the last ones to end leave it idle for less.
  const int64_t blocks = std::min<int64_t>(tiles, int64_t{16} * multiprocessors);
  run_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(kernel, tiles);
  return cudaGetLastError();
}

}  // namespace weightlift

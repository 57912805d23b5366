#include "transform/simd.h"

#include <algorithm>
#include <atomic>

namespace weightlift {
namespace {

std::atomic<Simd> limit{Simd::kAvx512};

Simd machine_simd() {
#if WEIGHTLIFT_X86
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Simd::kBaseline;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512vbmi");
  return has_avx512 ? Simd::kAvx512 : Simd::kAvx2;
#else
  return Simd::kBaseline;
#endif
}

}  // namespace

Simd simd() {
  static const Simd machine = machine_simd();
  return std::min(machine, limit.load(std::memory_order_relaxed));  // a setting: nothing is published with it
}

void limit_simd(Simd new_limit) { limit.store(new_limit, std::memory_order_relaxed); }

}  // namespace weightlift

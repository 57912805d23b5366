// Which vector instructions the host versions of the kernels may use. The build is for the baseline; wider versions are
// target(...) functions, chosen when an op is made by what this machine has.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define WEIGHTLIFT_X86 1
#define WEIGHTLIFT_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#ifdef __clang__  // knows no width in a target; with one that it does not know, it forgets the rest too
#define WEIGHTLIFT_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,f16c")))
#else
#define WEIGHTLIFT_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,f16c,prefer-vector-width=512")))
#endif
#endif
#define WEIGHTLIFT_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace weightlift {

// Each has all that the ones before it have. kAvx2 includes F16C, as every such machine does; kAvx512 means what Ice
// Lake and Zen 4 have of it, VBMI included.
enum class Simd : uint8_t { kBaseline, kAvx2, kAvx512 };

// The best that this machine has, or the limit where that is lower.
Simd simd();

// For tests, which compare the versions: ops that are made from now on use no more than this.
void limit_simd(Simd limit);

}  // namespace weightlift

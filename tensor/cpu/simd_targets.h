// Which instruction sets the SIMD loops are compiled for: on x86-64 SSE4 (any processor since
// 2008), AVX2 and AVX-512, with one-lane code as what an older one runs; on arm64 all that Highway
// offers. The environment variable LOCKSTEP_MAX_ISA (avx2, sse4 or scalar) limits x86-64 to fewer
// than the processor has, so that one machine can test the kernels of others.
#pragma once

#undef HWY_DISABLED_TARGETS
#ifdef LOCKSTEP_FEW_TARGETS  // sanitizer builds: the text is the same for all, and slow to compile
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif

namespace lockstep::cpu {
/// Applies LOCKSTEP_MAX_ISA, once; call it before kernels are chosen. Throws ValueError.
void respect_isa_limit();
}  // namespace lockstep::cpu

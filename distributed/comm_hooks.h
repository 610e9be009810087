// The comm hooks that need no state: plain averaging, and averaging in two-byte floats.
//
//   DistributedDataParallel net{Net{}, group, {.comm_hook = dist::hooks::fp16_compress()}};
#pragma once

#include <lockstep/distributed/comm_hook.h>

namespace lockstep::dist::hooks {

/// The mean, as DistributedDataParallel makes it without a hook.
LOCKSTEP_API CommHook all_reduce();

/// The mean, with half the bytes of f32 on the wire: each rank divides its gradients by the number
/// of ranks, rounds them to f16 (or bf16), and what their sum is there, rounded once more, is
/// widened again. Gradients below 2^-24 become 0 and above 65504 infinite in f16; bf16 has f32's
/// range and three bits less. As PyTorch's fp16_compress_hook, which rounds before it divides.
LOCKSTEP_API CommHook fp16_compress();
LOCKSTEP_API CommHook bf16_compress();

}  // namespace lockstep::dist::hooks

// The marks that decide how a symbol is seen: LOCKSTEP_API exports it from liblockstep.so (the
// library is built with hidden visibility), LOCKSTEP_FORMULA lets one text serve a CPU loop and a
// CUDA kernel.
#pragma once

#define LOCKSTEP_API __attribute__((visibility("default")))

// Precision: what an op asks of automatic mixed precision. Each op says it beside its name:
//
//   static constexpr Precision precision = Precision::full;
#pragma once

namespace lockstep {

enum class Precision {
  given,   // computes in the dtypes it gets; the default
  lower,   // as accurate in bf16 or f16, which sum in f32, and faster: products
  full,    // loses its meaning in half precision: exponentials, logarithms, norms, sums, losses
  widest,  // takes inputs of different dtypes and computes in the widest of them
};

}  // namespace lockstep

// The reductions compiled for the host, and what their derivatives read, found on Probes as for the
// element-wise ops.
#pragma once

#include <lockstep/tensor/ops/formula_traits.h>

namespace lockstep {
namespace reductions __attribute__((visibility("default"))) {

#define LOCKSTEP_FORMULA constexpr
#include <lockstep/tensor/reductions-inl.h>
#undef LOCKSTEP_FORMULA

using formulas::Probe;

/// What the derivative reads: bits of Probe, kA for the input and kY for the result.
template <class R>
inline constexpr unsigned reads = [] {
  if constexpr (R::predicate)
    return 0u;
  else if constexpr (R::shares)
    return unsigned{Probe::kA | Probe::kY};
  else
    return R().dx(Probe(Probe::kA, true), Probe(Probe::kY, true), Probe(Probe::kDy, true), Probe(1))
        .from;
}();

}  // namespace reductions
}  // namespace lockstep

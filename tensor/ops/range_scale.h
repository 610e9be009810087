// range_scale: what keeps squares of deviations within the range of f32 or f64 where a derivative
// is made of ops. Internal to the normalising ops.
#pragma once

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep::detail {

/// 1, or where `spread` (f32 or f64, not negative) is near the limits of its dtype a power of two
/// that takes it clear of them. A constant: normalised values do not depend on it.
inline Tensor range_scale(const Tensor& spread) {
  const NoGradGuard guard;
  const bool single = spread.dtype() == DType::f32;
  const double large = single ? 0x1p60 : 0x1p500, factor = single ? 0x1p-100 : 0x1p-700;
  const Tensor moderate_or_small = where(lt(spread, 1 / large), 1 / factor, ones_like(spread));
  return where(gt(spread, large), factor, moderate_or_small);
}

/// The same for a weight that a gradient is multiplied with, which may be near the largest number: 1 or
/// a small power of two for the whole of it.
inline double weight_scale(const Tensor& weight) {
  if (weight.numel() == 0) return 1;
  const NoGradGuard guard;
  const bool single = weight.dtype() == DType::f32;
  return max(abs(weight.detach())).item<double>() > (single ? 0x1p60 : 0x1p500)
             ? (single ? 0x1p-60 : 0x1p-500)
             : 1;
}

}  // namespace lockstep::detail

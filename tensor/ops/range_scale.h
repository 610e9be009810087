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

/// The same for all of a factor or term that may be near the largest number: 1 or a small power of two, as
/// a tensor of one element.
inline Tensor magnitude_scale(const Tensor& t) {
  const NoGradGuard guard;
  const bool single = t.dtype() == DType::f32;
  const Tensor one = ones({}, {.dtype = t.dtype(), .device = t.device()});
  if (t.numel() == 0) return one;
  return where(gt(max(abs(t.detach())), single ? 0x1p60 : 0x1p500), single ? 0x1p-60 : 0x1p-500,
               one);
}

}  // namespace lockstep::detail

// The channels-last memory order, [N, C, H, W] stored as [N, H, W, C]: what convolution works in. Internal to
// the ops that make or need it; raw, without graph.
#pragma once

#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep::detail {

/// Uninitialised, channels-last, in dtype and device of `like`.
inline Tensor empty_channels_last(const Shape& s, const Tensor& like) {
  checked_numel("empty", s);
  return empty_strided(s, {s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]},
                       {.dtype = like.dtype(), .device = like.device()});
}

/// t itself where it is channels-last, else a copy that is.
inline Tensor channels_last(const Tensor& t) {
  if (t.is_channels_last()) return t;
  Tensor out = empty_channels_last(t.shape(), t);
  kernels::copy(out, t);
  return out;
}

}  // namespace lockstep::detail

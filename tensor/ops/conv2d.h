// conv2d: two-dimensional convolution (cross-correlation, as everywhere in the field).
#pragma once

#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// Height and width; one number means both.
struct Size2d {
  int64_t h, w;
  constexpr Size2d(int64_t both) : h(both), w(both) {}
  constexpr Size2d(int64_t h, int64_t w) : h(h), w(w) {}
  bool operator==(const Size2d&) const = default;
};

struct Conv2dOptions {
  Size2d stride = 1;
  Size2d padding = 0;
  Size2d dilation = 1;
  int64_t groups = 1;
};

/// x [N, C, H, W], weight [O, C / groups, kh, kw], bias [O] or undefined; gives [N, O, H', W'] with
/// H' = (H + 2 padding - dilation (kh - 1) - 1) / stride + 1. f32 or f64. Works on and returns
/// channels-last memory, whatever the order of x.
LOCKSTEP_API Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                           Conv2dOptions options = {});

}  // namespace lockstep

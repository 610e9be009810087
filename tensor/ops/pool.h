// max_pool2d: the largest value under each window.
#pragma once

#include <optional>

#include <lockstep/tensor/ops/conv2d.h>

namespace lockstep {

struct MaxPool2dOptions {
  std::optional<Size2d> stride = {};  // the window's size by default
  Size2d padding = 0;                 // at most half the window; padded places never win
};

/// x [N, C, H, W] gives [N, C, H', W'] with H' = (H + 2 padding - window) / stride + 1, in x's
/// memory order. Where several values are largest the first in row-major order gets the gradient;
/// NaN wins over all.
LOCKSTEP_API Tensor max_pool2d(const Tensor& x, Size2d window, MaxPool2dOptions options = {});

}  // namespace lockstep

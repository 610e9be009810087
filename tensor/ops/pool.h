// max_pool2d: the largest value under each window.
#pragma once

#include <algorithm>
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

/// The sizes of a pooling, as its kernels take them.
struct PoolShape {
  Shape x, y;
  int64_t kh, kw, stride_h, stride_w, pad_h, pad_w;

  /// The part of a window that is inside the image.
  struct Window {
    int64_t y0, x0, y1, x1;
  };
  Window window(int64_t oy, int64_t ox) const {
    const int64_t top = oy * stride_h - pad_h, left = ox * stride_w - pad_w;
    return {std::max<int64_t>(top, 0), std::max<int64_t>(left, 0),
            x[2] - top > kh ? top + kh : x[2], x[3] - left > kw ? left + kw : x[3]};
  }
  /// Elements of a row of such a part, at most.
  int64_t row() const { return std::min(kw, x[3]); }
};

namespace kernels {
// All tensors are dense and of one memory order, row-major or channels-last. index [numel of y], in y's
// order, says which element of its window won: it counts within the part of the window that is inside
// the image at the top left, min(kh, h) rows of min(kw, w) elements. i32 for an x of up to four bytes,
// else i64.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& index, const Tensor& x, PoolShape s)>
    max_pool2d;
/// dx = 0 but at the winners, where it is the sum of the dy they won.
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& dy, const Tensor& index, PoolShape s)>
    max_pool2d_scatter;
/// y = the winners' elements of x: the transpose of scatter.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, const Tensor& index, PoolShape s)>
    max_pool2d_gather;
}  // namespace kernels

}  // namespace lockstep

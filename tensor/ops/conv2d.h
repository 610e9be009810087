// conv2d: two-dimensional convolution (cross-correlation, as everywhere in the field).
#pragma once

#include <lockstep/tensor/kernel.h>

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
/// H' = (H + 2 padding - dilation (kh - 1) - 1) / stride + 1. Floating. Works on and returns
/// channels-last memory, whatever the order of x.
LOCKSTEP_API Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                           Conv2dOptions options = {});

/// The sizes of a convolution, as its kernels take them.
struct ConvShape {
  int64_t n, c, h, w;  // input
  int64_t o, oh, ow;   // output
  int64_t kh, kw;
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t groups;

  bool operator==(const ConvShape&) const = default;
  ConvShape with_images(int64_t images) const {
    ConvShape s = *this;
    s.n = images;
    return s;
  }
  /// Elements of an input image, of an output image and of the weight.
  int64_t x_image() const { return c * h * w; }
  int64_t y_image() const { return o * oh * ow; }
  int64_t weights() const { return o * (c / groups) * kh * kw; }
};

namespace kernels {
// The three products of a convolution. All tensors are dense: x, dx [N, C, H, W] and y, dy [N, O, H', W']
// channels-last, w, dw [O, C / groups, kh, kw] row-major, bias [O] or undefined. At least one image.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, const Tensor& w,
                                const Tensor& bias, ConvShape s)>
    conv2d;
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& dy, const Tensor& w, ConvShape s)>
    conv2d_backward_data;
LOCKSTEP_API extern Kernel<void(const Tensor& dw, const Tensor& x, const Tensor& dy, ConvShape s)>
    conv2d_backward_weights;
}  // namespace kernels

}  // namespace lockstep

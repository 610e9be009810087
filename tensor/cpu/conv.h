// The three products of a convolution on the CPU, each over a block of images: y from (x, w), dx
// from (dy, w) and dw from (x, dy). Activations are channels-last. conv_onednn.cpp serves f32 where
// oneDNN is built in, conv_im2col.cpp everything else.
#pragma once

#include <algorithm>
#include <cstdint>

#include <lockstep/tensor/tensor.h>

namespace lockstep::cpu {

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
  int64_t x_image() const { return c * h * w; }
  int64_t y_image() const { return o * oh * ow; }
  int64_t weights() const { return o * (c / groups) * kh * kw; }
  /// At least four images and at most eight blocks, by the shape alone: results do not depend on
  /// threads.
  int64_t images_per_block() const { return std::max<int64_t>(4, (n + 7) / 8); }
  // The gradient of the weights is summed in f32 over parts: some images, or some rows of one. oneDNN
  // adds one row of pixels to another, and with few channels one pixel to another; kTerms of them have
  // a small enough rounding error.
  static constexpr int64_t kTerms = 8192;
  int64_t terms_of_row() const { return c / groups < 16 ? ow : 1; }
  int64_t images_per_sum() const {
    const int64_t most = std::max<int64_t>(kTerms / std::max<int64_t>(oh * terms_of_row(), 1), 1);
    const int64_t block = images_per_block(), sums = (block + most - 1) / most;
    return (block + sums - 1) / sums;
  }
  int64_t rows_per_sum() const {
    return std::clamp<int64_t>(kTerms / std::max<int64_t>(terms_of_row(), 1), 1, oh);
  }
};

// All tensors dense: x, dx [N, C, H, W] and y, dy [N, O, H', W'] channels-last, w, dw [O, C/groups,
// kh, kw] row-major, bias [O] or undefined. Results are overwritten. At least one image.
void conv_forward(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor& bias,
                  const Tensor& y);
void conv_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, const Tensor& dx);
void conv_backward_weights(const ConvShape& s, const Tensor& x, const Tensor& dy,
                           const Tensor& dw);

// The same by im2col and gemm, for f32 and f64.
void im2col_forward(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor& bias,
                    const Tensor& y);
void im2col_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, const Tensor& dx);
void im2col_backward_weights(const ConvShape& s, const Tensor& x, const Tensor& dy,
                             const Tensor& dw);

}  // namespace lockstep::cpu

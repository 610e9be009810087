// Convolution on the CPU: conv_onednn.cpp serves f32 where oneDNN is built in, conv_im2col.cpp everything
// else, in blocks of images.
#pragma once

#include <algorithm>
#include <cstdint>

#include <lockstep/tensor/ops/conv2d.h>

namespace lockstep::cpu {

// How a convolution is cut into blocks of images. By the shape alone: results do not depend on threads.

/// At least four images and at most eight blocks.
inline int64_t images_per_block(const ConvShape& s) { return std::max<int64_t>(4, (s.n + 7) / 8); }

// The gradient of the weights is summed in f32 over parts: some images, or some rows of one. oneDNN adds
// one row of pixels to another, and with few channels one pixel to another; kConvTerms of them have a
// small enough rounding error.
inline constexpr int64_t kConvTerms = 8192;
inline int64_t terms_of_row(const ConvShape& s) { return s.c / s.groups < 16 ? s.ow : 1; }
inline int64_t images_per_sum(const ConvShape& s) {
  const int64_t terms = std::max<int64_t>(s.oh * terms_of_row(s), 1);
  const int64_t most = std::max<int64_t>(kConvTerms / terms, 1);
  const int64_t block = images_per_block(s), sums = (block + most - 1) / most;
  return (block + sums - 1) / sums;
}
inline int64_t rows_per_sum(const ConvShape& s) {
  return std::clamp<int64_t>(kConvTerms / std::max<int64_t>(terms_of_row(s), 1), 1, s.oh);
}

// The three products by im2col and gemm, for f32 and f64.
void im2col_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias,
                    const ConvShape& s);
void im2col_backward_data(const Tensor& dx, const Tensor& dy, const Tensor& w, const ConvShape& s);
void im2col_backward_weights(const Tensor& dw, const Tensor& x, const Tensor& dy,
                             const ConvShape& s);

}  // namespace lockstep::cpu

// Conv2d: a two-dimensional convolution with weights of its own.
#pragma once

#include <lockstep/nn/module.h>
#include <lockstep/tensor/ops/conv2d.h>

namespace lockstep::nn {

struct Conv2dOptions {
  Size2d stride = 1;
  Size2d padding = 0;
  Size2d dilation = 1;
  int64_t groups = 1;
  bool bias = true;
  DType dtype = DType::f32;
};

/// x [N, in, H, W] gives [N, out, H', W'] with H' = (H + 2 padding - dilation (kh - 1) - 1) /
/// stride + 1. Weight and bias start uniform within 1 / sqrt(in / groups * kh * kw), as PyTorch's.
struct LOCKSTEP_API Conv2d : Module {
  Parameter weight;  // [out, in / groups, kh, kw]
  Parameter bias;    // [out], or undefined
  Conv2dOptions options;

  Conv2d(int64_t in, int64_t out, Size2d kernel, Conv2dOptions options = {});
  std::string extra_repr() const override;
  std::string brief() const override;

  Tensor forward(const Tensor& x);
  LOCKSTEP_MODULE(Conv2d, weight, bias, options)
};

}  // namespace lockstep::nn

// MaxPool2d: the largest value under each window.
#pragma once

#include <lockstep/nn/module.h>
#include <lockstep/tensor/ops/pool.h>

namespace lockstep::nn {

/// x [N, C, H, W] gives [N, C, H', W'] with H' = (H + 2 padding - kernel) / stride + 1; the stride
/// is the kernel's size by default.
struct LOCKSTEP_API MaxPool2d : Module {
  Size2d kernel;
  MaxPool2dOptions options;
  explicit MaxPool2d(Size2d kernel, MaxPool2dOptions options = {})
      : kernel(kernel), options(options) {}
  std::string extra_repr() const override;
  std::string brief() const override;
  Tensor forward(const Tensor& x) { return max_pool2d(x, kernel, options); }
  LOCKSTEP_MODULE(MaxPool2d, kernel, options)
};

}  // namespace lockstep::nn

// Linear: y = x W^T + b.
#pragma once

#include <lockstep/nn/module.h>
#include <lockstep/tensor/ops/activation.h>

namespace lockstep::nn {

struct LinearOptions {
  bool bias = true;
  DType dtype = DType::f32;
};

/// x [..., in] gives [..., out]. Weight and bias start uniform within 1 / sqrt(in), as PyTorch's.
struct LOCKSTEP_API Linear : Module {
  Parameter weight;  // [out, in]
  Parameter bias;    // [out], or undefined

  Linear(int64_t in, int64_t out, LinearOptions options = {});
  std::string extra_repr() const override;
  std::string brief() const override;
  int64_t in_features() const { return weight.size(1); }
  int64_t out_features() const { return weight.size(0); }

  /// The activation is applied in the product's own pass: what Sequential does with a ReLU that
  /// follows.
  Tensor forward(const Tensor& x, Activation activation = Activation::none);
  LOCKSTEP_MODULE(Linear, weight, bias)
};

}  // namespace lockstep::nn

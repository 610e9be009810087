// LayerNorm: each sample normalised over its last dimensions.
#pragma once

#include <lockstep/nn/module.h>

namespace lockstep::nn {

struct LayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;  // weight and bias
  bool bias = true;                // false: weight alone
  DType dtype = DType::f32;
};

/// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, which must have
/// the sizes `normalized_shape`.
struct LOCKSTEP_API LayerNorm : Module {
  Parameter weight, bias;  // [normalized_shape], ones and zeros; or undefined
  Shape normalized_shape;
  LayerNormOptions options;

  explicit LayerNorm(Shape normalized_shape, LayerNormOptions options = {});
  explicit LayerNorm(int64_t features, LayerNormOptions options = {})
      : LayerNorm(Shape{features}, options) {}
  std::string extra_repr() const override;
  std::string brief() const override;

  Tensor forward(const Tensor& x);
  LOCKSTEP_MODULE(LayerNorm, weight, bias, normalized_shape, options)
};

}  // namespace lockstep::nn

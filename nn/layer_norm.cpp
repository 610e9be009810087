#include <lockstep/nn/layer_norm.h>

#include <lockstep/tensor/ops/layer_norm.h>

namespace lockstep::nn {

LayerNorm::LayerNorm(Shape shape, LayerNormOptions o) : normalized_shape(shape), options(o) {
  LOCKSTEP_CHECK(shape.dims() > 0, ValueError, "LayerNorm: normalized_shape is empty");
  if (!o.elementwise_affine) return;
  weight = ones(shape, {.dtype = o.dtype});
  if (o.bias) bias = zeros(shape, {.dtype = o.dtype});
}

std::string LayerNorm::extra_repr() const {
  // As Python prints a tuple: (128,) but (4, 5).
  std::string shape = str_cat(normalized_shape[0], normalized_shape.dims() == 1 ? "," : "");
  for (int i = 1; i < normalized_shape.dims(); ++i) shape += str_cat(", ", normalized_shape[i]);
  return str_cat("(", shape, "), eps=", options.eps,
                 ", elementwise_affine=", options.elementwise_affine ? "True" : "False");
}
std::string LayerNorm::brief() const { return str_cat(normalized_shape); }

Tensor LayerNorm::forward(const Tensor& x) {
  return layer_norm(x, normalized_shape, weight, bias, options.eps);
}

}  // namespace lockstep::nn

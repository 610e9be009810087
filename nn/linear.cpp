#include <lockstep/nn/linear.h>

#include <cmath>

#include <lockstep/nn/init.h>
#include <lockstep/tensor/ops/linear.h>

namespace lockstep::nn {

Linear::Linear(int64_t in, int64_t out, LinearOptions options) {
  LOCKSTEP_CHECK(in >= 0 && out >= 0, ValueError,
                 "Linear: the numbers of features must not be negative, got ", in, " and ", out);
  weight = empty({out, in}, {.dtype = options.dtype});
  init::kaiming_uniform_(weight, {.a = std::sqrt(5.0)});
  if (!options.bias) return;
  bias = empty({out}, {.dtype = options.dtype});
  const double bound = in > 0 ? 1 / std::sqrt(static_cast<double>(in)) : 0;
  init::uniform_(bias, -bound, bound);
}

std::string Linear::extra_repr() const {
  return str_cat("in_features=", in_features(), ", out_features=", out_features(),
                 ", bias=", bias.defined() ? "True" : "False");
}
std::string Linear::brief() const { return str_cat(in_features(), "->", out_features()); }

Tensor Linear::forward(const Tensor& x, Activation activation) {
  return linear(x, weight, bias, activation);
}

}  // namespace lockstep::nn

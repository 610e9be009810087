// Activations as modules, for Sequential; elsewhere the functions of the same name are shorter. The
// input has any shape, the output the same.
#pragma once

#include <lockstep/nn/module.h>

namespace lockstep::nn {

struct LOCKSTEP_API Identity : Module {
  Tensor forward(Tensor x) { return x; }
  LOCKSTEP_MODULE(Identity)
};

struct LOCKSTEP_API ReLU : Module {
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(ReLU)
};

/// x Phi(x), Phi the standard normal distribution function; the exact form, by erf.
struct LOCKSTEP_API GELU : Module {
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(GELU)
};

/// x sigmoid(x)
struct LOCKSTEP_API SiLU : Module {
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(SiLU)
};

struct LOCKSTEP_API Sigmoid : Module {
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(Sigmoid)
};

struct LOCKSTEP_API Tanh : Module {
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(Tanh)
};

/// x where x > 0, else negative_slope * x.
struct LOCKSTEP_API LeakyReLU : Module {
  double negative_slope;
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope(negative_slope) {}
  std::string extra_repr() const override;
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(LeakyReLU, negative_slope)
};

/// exp(x) / sum of exp(x) along dim.
struct LOCKSTEP_API Softmax : Module {
  int64_t dim;
  explicit Softmax(int64_t dim) : dim(dim) {}
  std::string extra_repr() const override;
  Tensor forward(const Tensor& x);
  LOCKSTEP_MODULE(Softmax, dim)
};

/// log(softmax(x)) along dim.
struct LOCKSTEP_API LogSoftmax : Module {
  int64_t dim;
  explicit LogSoftmax(int64_t dim) : dim(dim) {}
  std::string extra_repr() const override;
  Tensor forward(const Tensor& x);
  LOCKSTEP_MODULE(LogSoftmax, dim)
};

}  // namespace lockstep::nn

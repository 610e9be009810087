// Activations as modules, for Sequential; elsewhere the functions of the same name read better.
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

/// The exact form, by erf.
struct LOCKSTEP_API GELU : Module {
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(GELU)
};

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

struct LOCKSTEP_API LeakyReLU : Module {
  double negative_slope;
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope(negative_slope) {}
  std::string extra_repr() const override;
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(LeakyReLU, negative_slope)
};

struct LOCKSTEP_API Softmax : Module {
  int64_t dim;
  explicit Softmax(int64_t dim) : dim(dim) {}
  std::string extra_repr() const override;
  Tensor forward(const Tensor& x);
  LOCKSTEP_MODULE(Softmax, dim)
};

struct LOCKSTEP_API LogSoftmax : Module {
  int64_t dim;
  explicit LogSoftmax(int64_t dim) : dim(dim) {}
  std::string extra_repr() const override;
  Tensor forward(const Tensor& x);
  LOCKSTEP_MODULE(LogSoftmax, dim)
};

}  // namespace lockstep::nn

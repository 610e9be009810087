// Dropout: in training, each element is zero with probability p and the others are scaled by 1 / (1
// - p).
#pragma once

#include <lockstep/nn/module.h>

namespace lockstep::nn {

/// p in [0, 1]. The mask is drawn from this thread's default_generator().
struct LOCKSTEP_API Dropout : Module {
  double p;
  explicit Dropout(double p = 0.5);
  std::string extra_repr() const override;
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(Dropout, p)
};

}  // namespace lockstep::nn

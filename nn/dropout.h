// Dropout: in training, each element is zeroed with probability p and the others are scaled by
// 1 / (1 - p); in evaluation it is the identity.
#pragma once

#include <lockstep/nn/module.h>

namespace lockstep::nn {

/// x of any shape; the output has the same. p in [0, 1], else ValueError. The mask is drawn from
/// this thread's default_generator().
struct LOCKSTEP_API Dropout : Module {
  double p;
  explicit Dropout(double p = 0.5);
  std::string extra_repr() const override;
  Tensor forward(Tensor x);
  LOCKSTEP_MODULE(Dropout, p)
};

}  // namespace lockstep::nn

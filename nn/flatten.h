// Flatten: dimensions start .. end become one; by default all but the batch.
#pragma once

#include <lockstep/nn/module.h>

namespace lockstep::nn {

/// x [N, A, B, ...] gives [N, A * B * ...]; with start and end, [.., product of start .. end, ..].
struct LOCKSTEP_API Flatten : Module {
  int64_t start_dim, end_dim;
  explicit Flatten(int64_t start_dim = 1, int64_t end_dim = -1)
      : start_dim(start_dim), end_dim(end_dim) {}
  std::string extra_repr() const override;
  std::string brief() const override { return {}; }
  Tensor forward(const Tensor& x) { return x.flatten(start_dim, end_dim); }
  LOCKSTEP_MODULE(Flatten, start_dim, end_dim)
};

}  // namespace lockstep::nn

// Losses as modules; the functions of tensor/ops do the same without one.
#pragma once

#include <lockstep/nn/module.h>
#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/mse_loss.h>

namespace lockstep::nn {

/// -log softmax(logits)[target]: logits [N, C, ...], target [N, ...] of class indices (i64);
/// the result is 0-d, or [N, ...] without reduction.
struct LOCKSTEP_API CrossEntropyLoss : Module {
  CrossEntropyOptions options;
  explicit CrossEntropyLoss(CrossEntropyOptions options = {}) : options(options) {}
  Tensor forward(const Tensor& logits, const Tensor& target) {
    return cross_entropy(logits, target, options);
  }
  LOCKSTEP_MODULE(CrossEntropyLoss, options)
};

/// (input - target)^2 for input and target of one shape: its mean or sum, 0-d, or every element.
struct LOCKSTEP_API MSELoss : Module {
  Reduction reduction;
  explicit MSELoss(Reduction reduction = Reduction::mean) : reduction(reduction) {}
  Tensor forward(const Tensor& input, const Tensor& target) {
    return mse_loss(input, target, reduction);
  }
  LOCKSTEP_MODULE(MSELoss, reduction)
};

}  // namespace lockstep::nn

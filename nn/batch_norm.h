// BatchNorm1d and BatchNorm2d: each channel normalised over the batch, with running statistics for
// evaluation.
#pragma once

#include <lockstep/nn/module.h>
#include <lockstep/tensor/ops/batch_norm.h>

namespace lockstep::nn {

struct BatchNormOptions {
  double eps = 1e-5;
  /// Of the running statistics; none: their plain average over all batches.
  std::optional<double> momentum = 0.1;
  bool affine = true;               // weight and bias
  bool track_running_stats = true;  // else batch statistics in evaluation too
  DType dtype = DType::f32;
};

/// The common base. In training y = (x - batch mean) / sqrt(batch variance + eps) * weight + bias,
/// and the running statistics move towards the batch's; in evaluation those are used instead.
struct LOCKSTEP_API BatchNorm : Module {
  Parameter weight, bias;            // [C], ones and zeros; undefined unless affine
  Buffer running_mean, running_var;  // [C], zeros and ones; undefined unless tracked
  Buffer num_batches_tracked;        // 0-d, i64
  int64_t num_features;
  BatchNormOptions options;
  /// Where a training batch is shared between ranks (see <lockstep/distributed/sync_batch_norm.h>);
  /// null: it is this module's own. No part of the state; a clone shares it.
  std::shared_ptr<BatchNormReduction> reduction = nullptr;

  explicit BatchNorm(int64_t num_features, BatchNormOptions options);
  std::string extra_repr() const override;
  std::string brief() const override;

 protected:
  /// `dims` are the numbers of dimensions that x may have.
  Tensor normalize(const Tensor& x, std::initializer_list<int> dims);
};

/// x [N, C] or [N, C, L].
struct LOCKSTEP_API BatchNorm1d : BatchNorm {
  explicit BatchNorm1d(int64_t num_features, BatchNormOptions options = {})
      : BatchNorm(num_features, options) {}
  Tensor forward(const Tensor& x) { return normalize(x, {2, 3}); }
  LOCKSTEP_MODULE(BatchNorm1d, weight, bias, running_mean, running_var, num_batches_tracked,
                  num_features, options, reduction)
};

/// x [N, C, H, W].
struct LOCKSTEP_API BatchNorm2d : BatchNorm {
  explicit BatchNorm2d(int64_t num_features, BatchNormOptions options = {})
      : BatchNorm(num_features, options) {}
  Tensor forward(const Tensor& x) { return normalize(x, {4}); }
  LOCKSTEP_MODULE(BatchNorm2d, weight, bias, running_mean, running_var, num_batches_tracked,
                  num_features, options, reduction)
};

}  // namespace lockstep::nn

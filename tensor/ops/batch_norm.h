// batch_norm: each channel normalised over the batch (Ioffe and Szegedy, 2015). Statistics and
// normalisation are separate kernels, so that ranks that share a batch can combine their statistics
// in between, through a BatchNormReduction (SyncBatchNorm).
#pragma once

#include <memory>

#include <lockstep/tensor/kernel.h>

namespace lockstep {

/// How the ranks that share a batch exchange statistics. Each rank makes the same calls in the same
/// order, whatever part of the batch it holds, none included.
class LOCKSTEP_API BatchNormReduction {
 public:
  virtual ~BatchNormReduction() = default;
  /// The tensors of all ranks, stacked in rank order: [ranks, ...t's shape].
  virtual Tensor gather(const Tensor& t) = 0;
  /// In place: the sum of the tensors of all ranks.
  virtual void sum(const Tensor& t) = 0;
};

/// y = (x - mean) / sqrt(variance + eps) * weight + bias per channel; x is [N, C] or [N, C, ...],
/// the others [C], of x's dtype, or f32 beside f16 and bf16. weight and bias may be undefined. In training mean and (biased) variance are the
/// batch's, and the running ones move towards them in place (the variance as unbiased estimate):
///   running = (1 - momentum) running + momentum batch
/// Otherwise the running ones are used; where they are undefined, always the batch's. The result
/// keeps x's memory order. With `batches` (i64, 0-d), the number of batches before this one, the momentum
/// is 1 / (batches + 1): the running statistics are those of all batches alike. An empty batch changes no running statistics. With `shared`, a training
/// batch is what all ranks hold together, and so are the sums behind x's gradient; the gradients of
/// weight and bias are this rank's part. ShapeError: sizes that do not fit, or a training batch with
/// one value per channel (with `shared`: fewer than two, thrown by every rank).
LOCKSTEP_API Tensor batch_norm(const Tensor& x, Tensor running_mean, Tensor running_var,
                               const Tensor& weight = {}, const Tensor& bias = {},
                               bool training = false, double momentum = 0.1, double eps = 1e-5,
                               std::shared_ptr<BatchNormReduction> shared = nullptr,
                               const Tensor& batches = {});

namespace kernels {
// x, y, dx and dy have one shape [N, C, ...] and one memory order: row-major or channels-last.
// Statistics and sums are f64, row-major; weight and bias [C], or undefined. An empty batch has
// statistics and sums of 0.

/// statistics [3, C]: mean and standard deviation (biased) of each channel, and what rounding to f64
/// took from the mean.
LOCKSTEP_API extern Kernel<void(const Tensor& statistics, const Tensor& x)> batch_norm_statistics;
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, const Tensor& statistics,
                                const Tensor& weight, const Tensor& bias, double eps)>
    batch_norm;
/// sums [2, C]: of dy, and of dy (x - mean) / sqrt(variance + eps).
LOCKSTEP_API extern Kernel<void(const Tensor& sums, const Tensor& dy, const Tensor& x,
                                const Tensor& statistics, double eps)>
    batch_norm_sums;
/// dx, where the statistics came from `count` (f64, 0-d) values per channel whose sums are given (over all
/// ranks, if they share statistics). count infinite: the statistics were constants.
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& dy, const Tensor& x,
                                const Tensor& statistics, const Tensor& sums, const Tensor& weight,
                                const Tensor& count, double eps)>
    batch_norm_backward;
/// statistics and count = those of all ranks, from all [ranks, 1 + 3 C] f64: each rank's count, then its
/// statistics, combined in rank order (Chan, Golub and LeVeque, 1979). Throws ShapeError for a count
/// below 2, which names what this rank has: `own` values per channel in x.
LOCKSTEP_API extern Kernel<void(const Tensor& statistics, const Tensor& count, const Tensor& all,
                                double own, Shape x)>
    batch_norm_combine;
/// Running statistics moved towards a batch's by momentum, or by 1 / (batches + 1) where batches (i64, 0-d)
/// is defined. A count of 0 changes nothing.
LOCKSTEP_API extern Kernel<void(const Tensor& running_mean, const Tensor& running_var,
                                const Tensor& statistics, const Tensor& count,
                                const Tensor& batches, double momentum)>
    batch_norm_update;
}  // namespace kernels

}  // namespace lockstep

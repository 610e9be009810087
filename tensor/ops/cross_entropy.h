// cross_entropy: the loss of a classifier, from raw scores (logits) and class indices, in one fused
// pass forward and one backward.
//
//   Tensor loss = cross_entropy(net(x), y);                            // x: [N, ...], y: [N] i64
//   Tensor each = cross_entropy(logits, y, {.reduction = Reduction::none});
#pragma once

#include <lockstep/tensor/ops/reduction.h>
#include <lockstep/tensor/kernel.h>

namespace lockstep {

struct CrossEntropyOptions {
  Reduction reduction = Reduction::mean;  // over the samples that are not ignored
  int64_t ignore_index = -100;            // samples with this label count for nothing
  double label_smoothing = 0;             // this part of the target is spread evenly; in [0, 1]
};

/// -log softmax(logits)[target]. logits [N, C] with target [N], [C] with a 0-d target, or [N, C,
/// d1, ...] with [N, d1, ...]; logits floating, target i64. The result is 0-d, or for
/// Reduction::none of target's shape. The mean over no samples is NaN. A label outside [0, C) is an
/// IndexError that names the sample.
LOCKSTEP_API Tensor cross_entropy(const Tensor& logits, const Tensor& target,
                                  CrossEntropyOptions options = {});

namespace kernels {
/// What a cross_entropy over [N, C, ...] is told.
struct CrossEntropyTask {
  Reduction reduction;
  int64_t ignore_index;
  double label_smoothing;
};
/// y (floating: of target's shape for Reduction::none, else 0-d), statistics [2, samples]: the maximum
/// over the classes, and log(sum(exp(x - maximum))), and divisor, 0-d, these in compute_dtype(): for the mean the number of samples
/// that are not ignored, at least 1, else 1. All are row-major, target (i64, [N, ...]) too.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& statistics, const Tensor& divisor,
                                const Tensor& logits, const Tensor& target, CrossEntropyTask task)>
    cross_entropy;
/// dx = (softmax(x) - target distribution) * dy / divisor, all in one pass; 0 for ignored samples. dy
/// is row-major, of y's shape.
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& statistics, const Tensor& divisor,
                                const Tensor& logits, const Tensor& target, const Tensor& dy,
                                CrossEntropyTask task)>
    cross_entropy_backward;
}  // namespace kernels

}  // namespace lockstep

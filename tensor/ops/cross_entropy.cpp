#include <lockstep/tensor/ops/cross_entropy.h>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/softmax.h>
#include <lockstep/tensor/ops/take_along.h>

namespace lockstep {
namespace {

struct CrossEntropy {
  static constexpr const char* name = "cross_entropy";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kInput(0) | kInput(1);
  kernels::CrossEntropyTask task;

  Tensor forward(Saver& saved, const Tensor& logits, const Tensor& target) {  // [N, C, ...], [N, ...]
    const TensorOptions options{.dtype = logits.dtype(), .device = logits.device()};
    const bool each = task.reduction == Reduction::none;
    const Tensor y = empty(each ? target.shape() : Shape{}, options);
    const TensorOptions computed{.dtype = compute_dtype(logits.dtype()),
                                 .device = logits.device()};
    const Tensor statistics = empty({2, target.numel()}, computed);  // maxima, logs of the sums
    const Tensor divisor = empty({}, computed);                      // of the gradient
    kernels::cross_entropy(y, statistics, divisor, logits, target, task);
    saved.keep(0, statistics);
    saved.keep(1, divisor);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor given = saved.input(0), target = saved.input(1);
    if (is_grad_enabled()) {
      const Tensor logits = given.to(compute_dtype(given.dtype()));
      const Tensor counts = ne(target, task.ignore_index).unsqueeze(1);  // [N, 1, ...]
      const Tensor weight = (dy.to(logits.dtype()) / saved.kept(1)).expand(target.shape()).unsqueeze(1);
      const Tensor difference = softmax(where(counts, logits, 0), 1) - distribution(target, logits);
      return dx.set(0, where(counts, difference * where(counts, weight, 0), 0).to(given.dtype()));
    }
    const Tensor& logits = given;
    Tensor g = empty(logits.shape(), {.dtype = logits.dtype(), .device = logits.device()});
    kernels::cross_entropy_backward(g, saved.kept(0), saved.kept(1), logits, target,
                                    dy.contiguous(), task);
    dx.set(0, std::move(g));
  }

  /// [N, C, ...]: what softmax should be.
  Tensor distribution(const Tensor& target, const Tensor& logits) const {
    const NoGradGuard guard;
    const Tensor valid = where(ne(target, task.ignore_index), target, 0).unsqueeze(1);
    const Tensor ones =
        lockstep::ones(valid.shape(), {.dtype = logits.dtype(), .device = logits.device()});
    return put_along(ones * (1 - task.label_smoothing), valid, 1, logits.shape()) +
           task.label_smoothing / static_cast<double>(logits.size(1));
  }
};

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& target, CrossEntropyOptions options) {
  LOCKSTEP_CHECK(is_floating(logits.dtype()), DTypeError,
                 "cross_entropy: logits are floating, got ", logits.dtype());
  LOCKSTEP_CHECK(target.dtype() == DType::i64, DTypeError,
                 "cross_entropy: target holds class indices in i64, got ", target.dtype(),
                 "; convert with to(DType::i64)");
  LOCKSTEP_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, ValueError,
                 "cross_entropy: label_smoothing is in [0, 1], got ", options.label_smoothing);
  Shape expected = logits.shape();  // of the target: logits' without the classes
  if (expected.dims() > 0) expected.erase(expected.dims() == 1 ? 0 : 1);
  LOCKSTEP_CHECK(logits.dim() > 0 && target.shape() == expected, ShapeError,
                 "cross_entropy: logits of shape ", logits.shape(), " need a target of shape ",
                 expected, ", got ", target.shape());
  const CrossEntropy op{{options.reduction, options.ignore_index, options.label_smoothing}};
  Tensor scores = logits, labels = target;  // [N, C, ...] and [N, ...]
  if (logits.dim() == 1) {
    scores = logits.unsqueeze(0);
    labels = target.unsqueeze(0);
  } else if (logits.is_channels_last()) {
    scores = logits.permute({0, 2, 3, 1}).reshape({target.numel(), logits.size(1)});
    labels = target.reshape({target.numel()});
  }
  const Tensor y = apply(op, scores.contiguous(), labels.contiguous());
  return options.reduction == Reduction::none ? y.reshape(target.shape()) : y;
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      CrossEntropyTask)>
    cross_entropy("cross_entropy");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, CrossEntropyTask)>
    cross_entropy_backward("cross_entropy", "_backward");
}  // namespace kernels

}  // namespace lockstep

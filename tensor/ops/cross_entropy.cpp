#include <lockstep/tensor/ops/cross_entropy.h>

#include <algorithm>

#include <lockstep/tensor/cpu/softmax_rows.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/softmax.h>
#include <lockstep/tensor/ops/take_along.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

struct CrossEntropy {
  static constexpr const char* name = "cross_entropy";
  static constexpr unsigned saves = kInput(0) | kInput(1);
  Reduction reduction;
  kernels::CrossEntropyTask task;
  double scale = 1;

  Tensor forward(Saver& saved, const Tensor& logits, const Tensor& target) {  // [N, C], [N]
    const TensorOptions options{.dtype = logits.dtype(), .device = logits.device()};
    const Tensor losses = empty(target.shape(), options);
    const Tensor statistics = empty({target.size(0), 2}, options);  // maximum, log of the sum
    saved.keep(0, statistics);
    const int64_t counted =
        kernels::cross_entropy.on(logits.device())(losses, statistics, logits, target, task);
    if (reduction == Reduction::none) return losses;
    if (reduction == Reduction::mean) scale = 1 / static_cast<double>(counted);
    Tensor y = empty({1}, options);
    kernels::sum.on(logits.device())(y, losses, scale);
    return y.view({});
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor logits = saved.input(0), target = saved.input(1);
    if (is_grad_enabled()) {
      const Tensor weight = (counts(target, logits.dtype()) * dy * scale).unsqueeze(1);  // [N, 1]
      return dx.set(0, (softmax(logits, 1) - distribution(target, logits)) * weight);
    }
    Tensor g = empty(logits.shape(), {.dtype = logits.dtype(), .device = logits.device()});
    kernels::cross_entropy_backward.on(logits.device())(g, saved.kept(0), logits, target,
                                                        dy.expand(target.shape()), scale, task);
    dx.set(0, std::move(g));
  }

  /// [N]: 1 for samples that count, 0 for ignored ones.
  Tensor counts(const Tensor& target, DType dtype) const {
    return ne(target, task.ignore_index).to(dtype);
  }
  /// [N, C]: what softmax should be.
  Tensor distribution(const Tensor& target, const Tensor& logits) const {
    NoGradGuard guard;
    const Tensor valid = target * ne(target, task.ignore_index).to(DType::i64);
    const Tensor ones =
        lockstep::ones({target.size(0), 1}, {.dtype = logits.dtype(), .device = logits.device()});
    return put_along(ones * (1 - task.label_smoothing), valid.unsqueeze(1), 1, logits.shape()) +
           task.label_smoothing / static_cast<double>(logits.size(1));
  }
};

int64_t cross_entropy_cpu(const Tensor& losses, const Tensor& statistics, const Tensor& logits,
                          const Tensor& target, kernels::CrossEntropyTask task) {
  const int64_t n = logits.size(0), classes = logits.size(1), stride = target.strides()[0];
  const int64_t* label = target.data<int64_t>();
  int64_t counted = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t t = label[i * stride];
    if (t == task.ignore_index) continue;
    LOCKSTEP_CHECK(t >= 0 && t < classes, IndexError,
                   "cross_entropy: labels are in [0, C); sample ", i, " has label ", t,
                   " with C = ", classes);
    ++counted;
  }
  dispatch_floating("cross_entropy", logits.dtype(), [&]<class T>(TypeTag<T>) {
    const T* scores = logits.data<T>();
    T *loss = losses.data<T>(), *kept = statistics.data<T>();
    const double smooth = task.label_smoothing;
    parallel_for(n, std::max<int64_t>(1, 8192 / std::max<int64_t>(classes, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const T* x = scores + i * classes;
                     T *max = kept + 2 * i, *log_sum = max + 1;
                     const int64_t t = label[i * stride];
                     if (t == task.ignore_index) {
                       loss[i] = *max = *log_sum = 0;
                       continue;
                     }
                     cpu::softmax_rows<T>().log_sum_exp(x, classes, max, log_sum);
                     loss[i] = (*max - x[t]) + *log_sum;
                     if (smooth > 0) {
                       double others = 0;  // sum of -log softmax over all classes
                       for (int64_t c = 0; c < classes; ++c) others += (*max - x[c]) + *log_sum;
                       loss[i] = static_cast<T>((1 - smooth) * loss[i] +
                                                smooth / static_cast<double>(classes) * others);
                     }
                   }
                 });
  });
  return counted;
}

void cross_entropy_backward_cpu(const Tensor& dx, const Tensor& statistics, const Tensor& logits,
                                const Tensor& target, const Tensor& dy, double scale,
                                kernels::CrossEntropyTask task) {
  const int64_t n = logits.size(0), classes = logits.size(1);
  const int64_t label_stride = target.strides()[0], dy_stride = dy.strides()[0];
  dispatch_floating("cross_entropy", logits.dtype(), [&]<class T>(TypeTag<T>) {
    const T *scores = logits.data<T>(), *kept = statistics.data<T>(), *weights = dy.data<T>();
    const int64_t* label = target.data<int64_t>();
    T* gradient = dx.data<T>();
    const T even = static_cast<T>(task.label_smoothing / static_cast<double>(classes));
    const T sharp = static_cast<T>(1 - task.label_smoothing);
    parallel_for(n, std::max<int64_t>(1, 8192 / std::max<int64_t>(classes, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     T* g = gradient + i * classes;
                     const int64_t t = label[i * label_stride];
                     if (t == task.ignore_index) {
                       std::fill_n(g, classes, T(0));
                       continue;
                     }
                     const T weight = static_cast<T>(scale) * weights[i * dy_stride];
                     cpu::softmax_rows<T>().scaled_softmax(scores + i * classes, kept[2 * i],
                                                           kept[2 * i + 1], even, weight, g,
                                                           classes);
                     g[t] -= sharp * weight;
                   }
                 });
  });
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& target, CrossEntropyOptions options) {
  LOCKSTEP_CHECK(is_floating(logits.dtype()), DTypeError,
                 "cross_entropy: logits are f32 or f64, got ", logits.dtype());
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
  const CrossEntropy op{options.reduction, {options.ignore_index, options.label_smoothing}};
  Tensor rows = logits;  // [..., C] -> [N, C]
  if (logits.dim() == 1) rows = logits.unsqueeze(0);
  for (int d = 1; d + 1 < logits.dim(); ++d) rows = rows.transpose(d, d + 1);
  rows = rows.reshape({-1, rows.size(-1)}).contiguous();
  const Tensor y = apply(op, rows, target.reshape({-1}));
  return options.reduction == Reduction::none ? y.reshape(target.shape()) : y;
}

namespace kernels {
constinit Kernel<int64_t(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         CrossEntropyTask)>
    cross_entropy("cross_entropy", cross_entropy_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      double, CrossEntropyTask)>
    cross_entropy_backward("cross_entropy", cross_entropy_backward_cpu);
}  // namespace kernels

}  // namespace lockstep

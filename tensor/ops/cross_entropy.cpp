#include <lockstep/tensor/ops/cross_entropy.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <lockstep/tensor/cpu/moments.h>
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
  kernels::CrossEntropyTask task;
  double scale = 1;  // of the gradient

  Tensor forward(Saver& saved, const Tensor& logits, const Tensor& target) {  // [N, C], [N]
    const TensorOptions options{.dtype = logits.dtype(), .device = logits.device()};
    const bool each = task.reduction == Reduction::none;
    const Tensor y = empty(each ? target.shape() : Shape{}, options);
    const Tensor statistics = empty({target.size(0), 2}, options);  // maximum, log of the sum
    const int64_t counted =
        kernels::cross_entropy.on(logits.device())(y, statistics, logits, target, task);
    if (task.reduction == Reduction::mean)
      scale = 1 / static_cast<double>(std::max<int64_t>(counted, 1));
    saved.keep(0, statistics);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor logits = saved.input(0), target = saved.input(1);
    if (is_grad_enabled()) {
      const Tensor counts = ne(target, task.ignore_index).unsqueeze(1);  // [N, 1]
      const Tensor weight = (dy * scale).expand(target.shape()).unsqueeze(1);
      const Tensor difference = softmax(where(counts, logits, 0), 1) - distribution(target, logits);
      return dx.set(0, where(counts, difference * where(counts, weight, 0), 0));
    }
    Tensor g = empty(logits.shape(), {.dtype = logits.dtype(), .device = logits.device()});
    kernels::cross_entropy_backward.on(logits.device())(g, saved.kept(0), logits, target,
                                                        dy.expand(target.shape()), scale, task);
    dx.set(0, std::move(g));
  }

  /// [N, C]: what softmax should be.
  Tensor distribution(const Tensor& target, const Tensor& logits) const {
    const NoGradGuard guard;
    const Tensor valid = where(ne(target, task.ignore_index), target, 0);
    const Tensor ones =
        lockstep::ones({target.size(0), 1}, {.dtype = logits.dtype(), .device = logits.device()});
    return put_along(ones * (1 - task.label_smoothing), valid.unsqueeze(1), 1, logits.shape()) +
           task.label_smoothing / static_cast<double>(logits.size(1));
  }
};

/// At least so many samples of `classes` scores are worth a task, and are summed apart; at most 64
/// such blocks.
int64_t samples_per_block(int64_t n, int64_t classes) {
  return std::max({int64_t{1}, 8192 / std::max<int64_t>(classes, 1), (n + 63) / 64});
}

/// Losses are computed and summed in Wide<T>: those of scores near the largest T exceed T.
int64_t cross_entropy_cpu(const Tensor& y, const Tensor& statistics, const Tensor& logits,
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
    using W = cpu::Wide<T>;
    const T* scores = logits.data<T>();
    T* kept = statistics.data<T>();
    T* losses = task.reduction == Reduction::none ? y.data<T>() : nullptr;
    const W smooth = task.label_smoothing, even = smooth / static_cast<W>(classes);
    const int64_t block = samples_per_block(n, classes);
    std::vector<W> sums(static_cast<size_t>((n + block - 1) / block));
    parallel_for(n, block, [&](int64_t begin, int64_t end) {
      W sum = 0;
      for (int64_t i = begin; i < end; ++i) {
        const T* x = scores + i * classes;
        T *max = kept + 2 * i, *log_sum = max + 1;
        const int64_t t = label[i * stride];
        W loss = 0;
        if (t == task.ignore_index) {
          *max = *log_sum = 0;
        } else {
          cpu::softmax_rows<T>().log_sum_exp(x, classes, max, log_sum);
          const W highest = *max, rest = *log_sum;  // together log(sum(exp(x)))
          loss = highest - x[t] + rest;
          if (smooth > 0) {
            W others = 0;  // -log softmax, summed over all classes
            for (int64_t c = 0; c < classes; ++c) others += highest - x[c] + rest;
            loss = (1 - smooth) * loss + even * others;
          }
        }
        sum += loss;
        if (losses) losses[i] = static_cast<T>(loss);
      }
      sums[static_cast<size_t>(begin / block)] = sum;
    });
    if (losses) return;
    const W total = std::accumulate(sums.begin(), sums.end(), W(0));
    *y.data<T>() = static_cast<T>(
        task.reduction == Reduction::mean ? total / static_cast<W>(counted) : total);
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
    parallel_for(n, samples_per_block(n, classes), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* g = gradient + i * classes;
        const int64_t t = label[i * label_stride];
        if (t == task.ignore_index) {
          std::fill_n(g, classes, T(0));
          continue;
        }
        const T weight = static_cast<T>(scale * weights[i * dy_stride]);
        // An infinite weight is multiplied last: the label's gradient is one product, not two.
        const T early = std::isfinite(weight) ? weight : T(1);
        cpu::softmax_rows<T>().scaled_softmax(scores + i * classes, kept[2 * i], kept[2 * i + 1],
                                              even, early, g, classes);
        g[t] -= sharp * early;
        if (!std::isfinite(weight))
          for (int64_t c = 0; c < classes; ++c) g[c] *= weight;
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
  const CrossEntropy op{{options.reduction, options.ignore_index, options.label_smoothing}};
  Tensor rows = logits;  // [..., C] -> [N, C]
  if (logits.dim() == 1) rows = logits.unsqueeze(0);
  for (int d = 1; d + 1 < logits.dim(); ++d) rows = rows.transpose(d, d + 1);
  rows = rows.reshape({target.numel(), rows.size(-1)}).contiguous();
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

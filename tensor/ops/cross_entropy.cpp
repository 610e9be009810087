#include <lockstep/tensor/ops/cross_entropy.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <lockstep/tensor/cpu/moments.h>
#include <lockstep/tensor/cpu/softmax_columns.h>
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
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kInput(0) | kInput(1);
  kernels::CrossEntropyTask task;
  double divisor = 1;  // of the gradient

  Tensor forward(Saver& saved, const Tensor& logits, const Tensor& target) {  // [N, C, ...], [N, ...]
    const TensorOptions options{.dtype = logits.dtype(), .device = logits.device()};
    const bool each = task.reduction == Reduction::none;
    const Tensor y = empty(each ? target.shape() : Shape{}, options);
    const Tensor statistics = empty({2, target.numel()}, options);  // maxima, logs of the sums
    const int64_t counted =
        kernels::cross_entropy.on(logits.device())(y, statistics, logits, target, task);
    if (task.reduction == Reduction::mean)
      divisor = static_cast<double>(std::max<int64_t>(counted, 1));
    saved.keep(0, statistics);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor logits = saved.input(0), target = saved.input(1);
    if (is_grad_enabled()) {
      const Tensor counts = ne(target, task.ignore_index).unsqueeze(1);  // [N, 1, ...]
      const Tensor weight = (dy / divisor).expand(target.shape()).unsqueeze(1);
      const Tensor difference = softmax(where(counts, logits, 0), 1) - distribution(target, logits);
      return dx.set(0, where(counts, difference * where(counts, weight, 0), 0));
    }
    Tensor g = empty(logits.shape(), {.dtype = logits.dtype(), .device = logits.device()});
    kernels::cross_entropy_backward.on(logits.device())(g, saved.kept(0), logits, target,
                                                        dy.contiguous(), divisor, task);
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

/// The samples of logits [N, C, ...] in spans that the shape alone decides: several rows of C scores
/// where the further dimensions hold one element, else neighbouring columns of one of the N.
struct Spans {
  int64_t n, classes, inner, samples, size, per_image;

  explicit Spans(const Tensor& logits)
      : n(logits.size(0)), classes(logits.size(1)), inner(1) {
    for (int d = 2; d < logits.dim(); ++d) inner *= logits.size(d);
    samples = n * inner;
    // At least so many samples are worth a task; at most 64 tasks of rows.
    size = inner == 1 ? std::max({int64_t{1}, 8192 / std::max<int64_t>(classes, 1), (n + 63) / 64})
                      : cpu::kSoftmaxColumns;
    per_image = inner == 1 ? 0 : (inner + size - 1) / size;
  }
  int64_t count() const { return inner == 1 ? (n + size - 1) / size : n * per_image; }

  struct Span {
    int64_t index, first, count;  // samples
    int64_t offset;               // of the first one's scores
  };
  template <class F>
  void for_each(const F& f) const {
    const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(size * classes, 1));
    parallel_for(count(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = inner == 1 ? 0 : i / per_image, first = i * size,
                      column = inner == 1 ? 0 : i % per_image * size;
        if (inner == 1)
          f(Span{i, first, std::min(size, n - first), first * classes});
        else
          f(Span{i, image * inner + column, std::min(size, inner - column),
                 image * classes * inner + column});
      }
    });
  }
  int64_t class_stride() const { return inner; }
  int64_t sample_stride() const { return inner == 1 ? classes : 1; }
};

/// Losses are computed and summed in Wide<T>: those of scores near the largest T exceed T.
int64_t cross_entropy_cpu(const Tensor& y, const Tensor& statistics, const Tensor& logits,
                          const Tensor& target, kernels::CrossEntropyTask task) {
  const Spans spans(logits);
  const int64_t classes = spans.classes, step = spans.class_stride();
  const int64_t* label = target.data<int64_t>();
  int64_t counted = 0;
  for (int64_t i = 0; i < spans.samples; ++i) {
    if (label[i] == task.ignore_index) continue;
    LOCKSTEP_CHECK(label[i] >= 0 && label[i] < classes, IndexError,
                   "cross_entropy: labels are in [0, C); sample ", i, " has label ", label[i],
                   " with C = ", classes);
    ++counted;
  }
  dispatch_floating("cross_entropy", logits.dtype(), [&]<class T>(TypeTag<T>) {
    using W = cpu::Wide<T>;
    const T* scores = logits.data<T>();
    T* losses = task.reduction == Reduction::none ? y.data<T>() : nullptr;
    const W smooth = task.label_smoothing, even = smooth / static_cast<W>(classes);
    std::vector<W> sums(static_cast<size_t>(spans.count()));
    spans.for_each([&](const Spans::Span& span) {
      const T* x = scores + span.offset;
      T *max = statistics.data<T>() + span.first, *log_sum = max + spans.samples;
      if (step > 1)
        cpu::softmax_columns<T>().log_sum_exp(x, step, classes, span.count, max, log_sum);
      W sum = 0;
      for (int64_t i = 0; i < span.count; ++i, x += spans.sample_stride()) {
        const int64_t t = label[span.first + i];
        W loss = 0;
        if (t != task.ignore_index) {
          if (step == 1) cpu::softmax_rows<T>().log_sum_exp(x, classes, max + i, log_sum + i);
          const W highest = max[i], rest = log_sum[i];  // together log(sum(exp(x)))
          loss = highest - x[t * step] + rest;
          if (smooth > 0) {
            W others = 0;  // -log softmax, summed over all classes
            for (int64_t c = 0; c < classes; ++c) others += highest - x[c * step] + rest;
            loss = (1 - smooth) * loss + even * others;
          }
        }
        sum += loss;
        if (losses) losses[span.first + i] = static_cast<T>(loss);
      }
      sums[static_cast<size_t>(span.index)] = sum;
    });
    if (losses) return;
    const W total = std::accumulate(sums.begin(), sums.end(), W(0));
    *y.data<T>() = static_cast<T>(
        task.reduction == Reduction::mean ? total / static_cast<W>(counted) : total);
  });
  return counted;
}

void cross_entropy_backward_cpu(const Tensor& dx, const Tensor& statistics, const Tensor& logits,
                                const Tensor& target, const Tensor& dy, double divisor,
                                kernels::CrossEntropyTask task) {
  const Spans spans(logits);
  const int64_t classes = spans.classes, step = spans.class_stride();
  const int64_t* label = target.data<int64_t>();
  dispatch_floating("cross_entropy", logits.dtype(), [&]<class T>(TypeTag<T>) {
    const T even = static_cast<T>(task.label_smoothing / static_cast<double>(classes));
    const T sharp = static_cast<T>(1 - task.label_smoothing);
    const int64_t dy_step = task.reduction == Reduction::none ? 1 : 0;
    const auto weight_of = [&](int64_t i) {
      return static_cast<T>(dy.data<T>()[i * dy_step] / divisor);
    };
    // An infinite weight is multiplied last: the label's gradient is one product, not two.
    const auto early = [](T weight) { return std::isfinite(weight) ? weight : T(1); };
    spans.for_each([&](const Spans::Span& span) {
      const T *x = logits.data<T>() + span.offset, *max = statistics.data<T>() + span.first,
              *log_sum = max + spans.samples;
      T* g = dx.data<T>() + span.offset;
      if (step > 1) {
        T weights[cpu::kSoftmaxColumns];
        for (int64_t i = 0; i < span.count; ++i) weights[i] = early(weight_of(span.first + i));
        cpu::softmax_columns<T>().scaled_softmax(x, step, classes, span.count, max, log_sum, even,
                                                 weights, g);
      }
      for (int64_t i = 0; i < span.count; ++i, x += spans.sample_stride(), g += spans.sample_stride()) {
        const int64_t t = label[span.first + i];
        if (t == task.ignore_index) {
          for (int64_t c = 0; c < classes; ++c) g[c * step] = 0;
          continue;
        }
        const T weight = weight_of(span.first + i);
        if (step == 1)
          cpu::softmax_rows<T>().scaled_softmax(x, max[i], log_sum[i], even, early(weight), g,
                                                classes);
        g[t * step] -= sharp * early(weight);
        if (!std::isfinite(weight))
          for (int64_t c = 0; c < classes; ++c) g[c * step] *= weight;
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
constinit Kernel<int64_t(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         CrossEntropyTask)>
    cross_entropy("cross_entropy", cross_entropy_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      double, CrossEntropyTask)>
    cross_entropy_backward("cross_entropy", cross_entropy_backward_cpu);
}  // namespace kernels

}  // namespace lockstep

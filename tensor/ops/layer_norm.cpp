#include <lockstep/tensor/ops/layer_norm.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <lockstep/tensor/cpu/moments.h>
#include <lockstep/tensor/cpu/norm_rows.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/range_scale.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

/// Over rows: x [M, n], weight and bias [n] or undefined; the result has `shape`.
struct LayerNorm {
  static constexpr const char* name = "layer_norm";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kInput(0) | kInput(1);
  double eps;
  bool has_weight;
  Shape shape;

  Tensor forward(Saver& saved, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const TensorOptions options{.dtype = x.dtype(), .device = x.device()};
    Tensor y = empty(shape, options);
    const Tensor statistics = empty({x.size(0), 3}, options);
    kernels::layer_norm.on(x.device())(y.view(x.shape()), statistics, x, weight, bias, eps);
    saved.keep(0, statistics);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy_shaped, InputGradients& dx) const {
    const Tensor x = saved.input(0);
    const Tensor dy = dy_shaped.reshape(x.shape());  // [M, n]
    const Tensor weight = has_weight ? saved.input(1) : Tensor();
    if (is_grad_enabled()) return backward_by_ops(x, weight, saved.kept(0), dy, dx);
    const TensorOptions options{.dtype = x.dtype(), .device = x.device()};
    auto place = [&](int i, const Shape& shape) {
      if (!dx.needed(i)) return Tensor();
      const Tensor given = dx.destination(i);
      return given.defined() ? given : empty(shape, options);
    };
    const Tensor g = dx.needed(0) ? empty(x.shape(), options) : Tensor();
    const Tensor dweight = place(1, {x.size(1)}), dbias = place(2, {x.size(1)});
    kernels::layer_norm_backward.on(x.device())(g, dweight, dbias, dy.contiguous(), x, weight,
                                                saved.kept(0));
    if (g.defined()) dx.set(0, g);
    if (dweight.defined()) dx.set(1, dweight);
    if (dbias.defined()) dx.set(2, dbias);
  }

  void backward_by_ops(const Tensor& x, const Tensor& weight, const Tensor& statistics,
                       const Tensor& dy, InputGradients& dx) const {
    const Tensor range = detail::range_scale(statistics.narrow(1, 2, 1));  // [M, 1]
    const Tensor scaled = x * range, about_mean = scaled - mean(scaled, {1}, true);
    const Tensor centred = about_mean - mean(about_mean, {1}, true);  // the mean was rounded
    const Tensor variance = mean(square(centred), {1}, true) + square(range * std::sqrt(eps));
    const Tensor rstd = 1.0 / sqrt(variance);  // [M, 1]
    const Tensor normal = centred * rstd;      // [M, n]
    if (dx.needed(0)) {
      const double scale = has_weight ? detail::magnitude_scale(weight) : 1;
      const Tensor g = has_weight ? dy * (weight * scale) : dy;
      const Tensor gradient = g - mean(g, {1}, true) - normal * mean(g * normal, {1}, true);
      dx.set(0, rstd * gradient * (range * (1 / scale)));
    }
    if (dx.needed(1)) dx.set(1, sum(dy * normal, {0}));
    if (dx.needed(2)) dx.set(2, sum(dy, {0}));
  }
};

template <class T>
T* pointer(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

void layer_norm_cpu(const Tensor& y, const Tensor& statistics, const Tensor& x,
                    const Tensor& weight, const Tensor& bias, double eps) {
  const int64_t n = x.size(1);
  dispatch_floating("layer_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    const T *from = x.data<T>(), *w = pointer<T>(weight), *b = pointer<T>(bias);
    T *to = y.data<T>(), *kept = statistics.data<T>();
    parallel_for(x.size(0), std::max<int64_t>(1, 16384 / std::max<int64_t>(n, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i)
                     cpu::norm_rows<T>().layer_norm(from + i * n, w, b, eps, to + i * n,
                                                    kept + 3 * i, n);
                 });
  });
}

/// The gradients of weight and bias are summed in blocks of rows, the sums added in order.
void layer_norm_backward_cpu(const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                             const Tensor& dy, const Tensor& x, const Tensor& weight,
                             const Tensor& statistics) {
  const int64_t rows = x.size(0), n = x.size(1);
  const int64_t block = std::max<int64_t>({16, 65536 / std::max<int64_t>(n, 1), (rows + 63) / 64});
  constexpr int64_t kRunRows = 64;  // added in T before they are added in Wide<T>
  dispatch_floating("layer_norm", x.dtype(), [&]<class T>(TypeTag<T>) {
    using W = cpu::Wide<T>;
    T *to = pointer<T>(dx), *dw = pointer<T>(dweight), *db = pointer<T>(dbias);
    const T *g = dy.data<T>(), *from = x.data<T>(), *w = pointer<T>(weight),
            *kept = statistics.data<T>();
    const int64_t width = (dw ? n : 0) + (db ? n : 0);  // dweight's sums, then dbias's
    std::vector<W> partial(
        static_cast<size_t>(std::max<int64_t>(1, (rows + block - 1) / block) * width));
    // Element j of a run of rows of dweight (of dbias, from width - n on) without overflow.
    auto wide_run = [&](int64_t first, int64_t last, int64_t j) {
      W sum = 0;
      for (int64_t i = first; i < last; ++i) {
        const T* row = kept + 3 * i;
        const int64_t k = i * n + j % n;
        sum += dw && j < n ? g[k] * ((static_cast<W>(from[k]) - row[0] - row[1]) / row[2]) : g[k];
      }
      return sum;
    };
    parallel_for(rows, block, [&](int64_t begin, int64_t end) {
      std::vector<T> run(static_cast<size_t>(width));
      W* sums = partial.data() + begin / block * width;
      for (int64_t i = begin; i < end; i += kRunRows) {
        const int64_t last = std::min(i + kRunRows, end);
        std::fill(run.begin(), run.end(), T(0));
        for (int64_t r = i; r < last; ++r)
          cpu::norm_rows<T>().layer_norm_backward(
              g + r * n, from + r * n, w, kept + 3 * r, to ? to + r * n : nullptr,
              dw ? run.data() : nullptr, db ? run.data() + width - n : nullptr, n);
        for (int64_t j = 0; j < width; ++j) {
          const T sum = run[static_cast<size_t>(j)];
          sums[j] += std::isfinite(sum) ? sum : wide_run(i, last, j);
        }
      }
    });
    for (size_t i = static_cast<size_t>(width); i < partial.size(); ++i)
      partial[i % static_cast<size_t>(width)] += partial[i];
    if (dw) std::copy_n(partial.begin(), n, dw);
    if (db) std::copy_n(partial.begin() + (width - n), n, db);
  });
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                  const Tensor& bias, double eps) {
  const int lead = x.dim() - normalized_shape.dims();
  bool fits = lead >= 0 && !normalized_shape.empty();
  for (int i = 0; fits && i < normalized_shape.dims(); ++i)
    fits = x.shape()[lead + i] == normalized_shape[i];
  LOCKSTEP_CHECK(fits, ShapeError, "layer_norm: the last dimensions of the input must be ",
                 normalized_shape, ", got ", x.shape());
  for (const Tensor* t : {&weight, &bias}) {
    if (!t->defined()) continue;
    LOCKSTEP_CHECK(t->shape() == normalized_shape, ShapeError,
                   "layer_norm: weight and bias have shape ", normalized_shape, ", got ",
                   t->shape());
    LOCKSTEP_CHECK(t->dtype() == x.dtype(), DTypeError,
                   "layer_norm: weight and bias have the input's dtype ", x.dtype(), ", got ",
                   t->dtype());
  }
  const int64_t n = normalized_shape.numel();
  const Tensor rows = x.reshape({n ? x.numel() / n : 0, n}).contiguous();
  auto flat = [n](const Tensor& t) { return t.defined() ? t.reshape({n}).contiguous() : t; };
  return apply(LayerNorm{eps, weight.defined(), x.shape()}, rows, flat(weight), flat(bias));
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      double)>
    layer_norm("layer_norm", layer_norm_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&)>
    layer_norm_backward("layer_norm", layer_norm_backward_cpu);
}  // namespace kernels

}  // namespace lockstep

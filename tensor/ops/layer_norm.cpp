#include <lockstep/tensor/ops/layer_norm.h>

#include <cmath>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/range_scale.h>
#include <lockstep/tensor/ops/reduce.h>

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
    const Tensor statistics =
        empty({x.size(0), 3}, {.dtype = compute_dtype(x.dtype()), .device = x.device()});
    kernels::layer_norm(y.view(x.shape()), statistics, x, weight, bias, eps);
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
    kernels::layer_norm_backward(g, dweight, dbias, dy.contiguous(), x, weight,
                                                saved.kept(0));
    if (g.defined()) dx.set(0, g);
    if (dweight.defined()) dx.set(1, dweight);
    if (dbias.defined()) dx.set(2, dbias);
  }

  void backward_by_ops(const Tensor& given, const Tensor& given_weight, const Tensor& statistics,
                       const Tensor& given_dy, InputGradients& dx) const {
    const DType dtype = given.dtype(), computed = compute_dtype(dtype);
    const Tensor x = given.to(computed), dy = given_dy.to(computed);
    const Tensor weight = has_weight ? given_weight.to(computed) : Tensor();
    const Tensor range = detail::range_scale(statistics.narrow(1, 2, 1));  // [M, 1]
    const Tensor scaled = x * range, about_mean = scaled - mean(scaled, {1}, true);
    const Tensor centred = about_mean - mean(about_mean, {1}, true);  // the mean was rounded
    const Tensor variance = mean(square(centred), {1}, true) + square(range * std::sqrt(eps));
    const Tensor rstd = 1.0 / sqrt(variance);  // [M, 1]
    const Tensor normal = centred * rstd;      // [M, n]
    if (dx.needed(0)) {
      const Tensor scale = has_weight ? detail::magnitude_scale(weight) : ones_like(range);
      const Tensor g = has_weight ? dy * (weight * scale) : dy;
      const Tensor gradient = g - mean(g, {1}, true) - normal * mean(g * normal, {1}, true);
      dx.set(0, (rstd * gradient * (range / scale)).to(dtype));
    }
    if (dx.needed(1)) dx.set(1, sum(dy * normal, {0}).to(dtype));
    if (dx.needed(2)) dx.set(2, sum(dy, {0}).to(dtype));
  }
};

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
    layer_norm("layer_norm");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&)>
    layer_norm_backward("layer_norm", "_backward");
}  // namespace kernels

}  // namespace lockstep

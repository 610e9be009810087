#include <lockstep/tensor/ops/batch_norm.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/join.h>
#include <lockstep/tensor/ops/range_scale.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {
namespace {

/// dy in the memory order of x, which is row-major or channels-last.
Tensor in_order_of(const Tensor& x, const Tensor& dy) {
  if (dy.strides() == x.strides() || (x.is_contiguous() && dy.is_contiguous())) return dy;
  Tensor same = empty_like(x);
  kernels::copy(same, dy);
  return same;
}

/// x summed over all ranks; so is its gradient, since each rank's x reaches each rank's y.
struct SharedSum {
  static constexpr const char* name = "batch_norm's shared sum";
  static constexpr unsigned saves = 0;
  std::shared_ptr<BatchNormReduction> shared;

  Tensor forward(const Tensor& x) {
    const Tensor y = x.contiguous().clone();
    shared->sum(y);
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, apply(SharedSum{shared}, dy));
  }
};

/// How many values a channel of x [N, C, ...] has.
int64_t values_per_channel(const Tensor& x) {
  int64_t n = 1;
  for (int d = 0; d < x.dim(); ++d)
    if (d != 1) n *= x.shape()[d];
  return n;
}

struct BatchNorm {
  static constexpr const char* name = "batch_norm";
  static constexpr unsigned saves = kInput(0) | kInput(1);
  Tensor running_mean, running_var, batches;
  bool by_batch, has_weight;
  DType weight_dtype, bias_dtype;
  double momentum, eps;
  std::shared_ptr<BatchNormReduction> shared;

  Tensor forward(Saver& saved, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const TensorOptions f64{.dtype = DType::f64, .device = x.device()};
    const Tensor statistics =  // [3, C]: means, deviations, what rounding took from the means
        empty({3, x.size(1)}, f64);
    // Values per channel behind the statistics; infinite where they are constants.
    const double own = static_cast<double>(values_per_channel(x));
    const Tensor count =
        full({}, by_batch ? own : std::numeric_limits<double>::infinity(), f64);
    if (by_batch) {
      kernels::batch_norm_statistics(statistics, x);
      if (shared) {
        const Tensor mine = cat({count.view({1}), statistics.view({statistics.numel()})}, 0);
        kernels::batch_norm_combine(statistics, count, shared->gather(mine).contiguous(), own,
                                    x.shape());
      }
      if (running_mean.defined()) {
        kernels::batch_norm_update(running_mean, running_var, statistics, count, batches, momentum);
        running_mean.storage().bump_version();
        running_var.storage().bump_version();
      }
    } else {
      Tensor(statistics[0]).copy_(running_mean);
      Tensor(statistics[1]).copy_(sqrt(running_var.to(DType::f64)));
      Tensor(statistics[2]).zero_();
    }
    running_mean = running_var = batches = Tensor();
    saved.keep(0, statistics);
    saved.keep(1, count);
    Tensor y = empty_like(x);
    kernels::batch_norm(y, x, statistics, weight, bias, eps);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy_any, InputGradients& dx) const {
    const Tensor x = saved.input(0), statistics = saved.kept(0), count = saved.kept(1);
    const Tensor weight = has_weight ? saved.input(1) : Tensor();
    if (is_grad_enabled()) return backward_by_ops(x, weight, statistics, count, dy_any, dx);
    const Tensor dy = in_order_of(x, dy_any);
    const Tensor sums = empty({2, x.size(1)}, {.dtype = DType::f64, .device = x.device()});
    kernels::batch_norm_sums(sums, dy, x, statistics, eps);
    Tensor sums_of_all = sums;
    if (shared) {  // also where this rank needs no dx: another one may
      sums_of_all = sums.clone();
      shared->sum(sums_of_all);
    }
    if (dx.needed(0)) {
      Tensor g = empty_like(x);
      kernels::batch_norm_backward(g, dy, x, statistics, sums_of_all, weight, count, eps);
      dx.set(0, std::move(g));
    }
    if (dx.needed(1)) dx.set(1, sums[1].to(weight_dtype));
    if (dx.needed(2)) dx.set(2, sums[0].to(bias_dtype));
  }

  void backward_by_ops(const Tensor& given, const Tensor& given_weight, const Tensor& statistics,
                       const Tensor& count, const Tensor& given_dy, InputGradients& dx) const {
    const DType dtype = given.dtype(), computed = compute_dtype(dtype);
    const Tensor x = given.to(computed), dy = given_dy.to(computed);
    const Tensor weight = has_weight ? given_weight.to(computed) : Tensor();
    Shape others, per_channel = Shape::filled(
                      x.dim(), 1);  // all dimensions but the channels'; [1, C, 1, ...]
    for (int d = 0; d < x.dim(); ++d)
      if (d != 1) others.push_back(d);
    per_channel[1] = x.size(1);
    const auto over_batch = [&](const Tensor& t) {  // [1, C, 1, ...]
      if (!shared) return mean(t, others, true);
      return apply(SharedSum{shared}, sum(t, others, true)) / count.to(x.dtype());
    };
    const Tensor deviation = statistics[1].to(x.dtype()).reshape(per_channel);
    const Tensor range = detail::range_scale(maximum(deviation, std::sqrt(eps)));
    const Tensor scaled = x * range;
    Tensor centred, variance;
    Tensor shrink;  // of centred, so that running statistics far from x do not overflow it
    if (by_batch) {
      const Tensor about_mean = scaled - over_batch(scaled);
      centred = about_mean - over_batch(about_mean);  // the mean was rounded
      variance = over_batch(square(centred));
    } else {
      const Tensor center = statistics[0].to(x.dtype()).reshape(per_channel);
      shrink = minimum(detail::magnitude_scale(x), detail::magnitude_scale(center));
      centred = x * (range * shrink) - center * (range * shrink);
      variance = square(deviation * range);
    }
    const Tensor rstd = 1.0 / sqrt(variance + square(range * std::sqrt(eps)));
    const Tensor normal = centred * rstd;
    if (dx.needed(0) || shared) {
      Tensor g = dy;
      if (by_batch) g = g - over_batch(g) - normal * over_batch(g * normal);
      g = g * rstd * range;
      // The weight last, as in the kernel: it is the same for all of a channel, and may be infinite.
      if (dx.needed(0))
        dx.set(0, (has_weight ? g * weight.reshape(per_channel) : g).to(dtype));
    }
    if (dx.needed(1)) {
      const Tensor dweight = sum(dy * normal, others);
      dx.set(1, (shrink.defined() ? dweight / shrink : dweight).to(weight_dtype));
    }
    if (dx.needed(2)) dx.set(2, sum(dy, others).to(bias_dtype));
  }
};

}  // namespace

Tensor batch_norm(const Tensor& x, Tensor running_mean, Tensor running_var, const Tensor& weight,
                  const Tensor& bias, bool training, double momentum, double eps,
                  std::shared_ptr<BatchNormReduction> shared, const Tensor& batches) {
  LOCKSTEP_CHECK(x.dim() >= 2, ShapeError, "batch_norm: the input is [N, C] or [N, C, ...], got ",
                 x.shape());
  LOCKSTEP_CHECK(running_mean.defined() == running_var.defined(), ValueError,
                 "batch_norm: running_mean and running_var come together");
  if (training && running_mean.defined())
    for (const Tensor* t : {&running_mean, &running_var}) t->storage().check_writable("batch_norm");
  const int64_t channels = x.size(1);
  for (const Tensor* t :
       std::initializer_list<const Tensor*>{&running_mean, &running_var, &weight, &bias}) {
    if (!t->defined()) continue;
    LOCKSTEP_CHECK(t->shape() == Shape{channels}, ShapeError, "batch_norm: the input ", x.shape(),
                   " has ", channels, " channels; weight, bias and running statistics have shape [",
                   channels, "], got ", t->shape());
    LOCKSTEP_CHECK(t->dtype() == x.dtype() || t->dtype() == compute_dtype(x.dtype()), DTypeError,
                   "batch_norm: the input is ", x.dtype(),
                   "; weight, bias and running statistics too, or f32 beside f16 and bf16, got ",
                   t->dtype());
  }
  const bool by_batch = training || !running_mean.defined();
  if (!training) shared = nullptr;
  LOCKSTEP_CHECK(!training || shared || values_per_channel(x) != 1, ShapeError,
                 "batch_norm: training needs more than one value per channel, got ", x.shape());
  const bool dense = x.is_contiguous() || x.is_channels_last();
  const auto dtype_of = [&](const Tensor& t) { return t.defined() ? t.dtype() : x.dtype(); };
  return apply(BatchNorm{running_mean, running_var, batches, by_batch, weight.defined(),
                         dtype_of(weight), dtype_of(bias), momentum, eps, std::move(shared)},
               dense ? x : x.contiguous(), weight.defined() ? weight.contiguous() : weight,
               bias.defined() ? bias.contiguous() : bias);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&)> batch_norm_statistics("batch_norm", "_statistics");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      double)>
    batch_norm("batch_norm");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double)>
    batch_norm_sums("batch_norm", "_sums");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&, double)>
    batch_norm_backward("batch_norm", "_backward");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, double, Shape)>
    batch_norm_combine("batch_norm", "_combine");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      double)>
    batch_norm_update("batch_norm", "_update");
}  // namespace kernels

}  // namespace lockstep

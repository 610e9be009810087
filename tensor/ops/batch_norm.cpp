#include <lockstep/tensor/ops/batch_norm.h>

#include <initializer_list>
#include <limits>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {
namespace {

/// dy in the memory order of x, which is row-major or channels-last.
Tensor in_order_of(const Tensor& x, const Tensor& dy) {
  if (dy.strides() == x.strides() || (x.is_contiguous() && dy.is_contiguous())) return dy;
  Tensor same = empty_like(x);
  detail::copy_kernel(same, dy);
  return same;
}

struct BatchNorm {
  static constexpr const char* name = "batch_norm";
  static constexpr unsigned saves = kInput(0) | kInput(1);
  Tensor running_mean, running_var;
  bool by_batch, has_weight;
  double momentum, eps;
  double count =
      std::numeric_limits<double>::infinity();  // values per channel behind the statistics
  Tensor statistics = {};                       // [2, C] f64

  Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    statistics = empty({2, x.size(1)}, {.dtype = DType::f64, .device = x.device()});
    if (by_batch) {
      kernels::batch_norm_statistics.on(x.device())(statistics, x);
      count = static_cast<double>(x.numel() / x.size(1));
      if (running_mean.defined()) {
        const Tensor mean = statistics[0].to(running_mean.dtype()),
                     var = statistics[1].to(running_var.dtype());
        running_mean.mul_(1 - momentum).add_(mean, momentum);
        running_var.mul_(1 - momentum).add_(var, momentum * (count / (count - 1)));
      }
    } else {
      statistics.select(0, 0).copy_(running_mean);
      statistics.select(0, 1).copy_(running_var);
    }
    running_mean = running_var = Tensor();
    Tensor y = empty_like(x);
    kernels::batch_norm.on(x.device())(y, x, statistics, weight, bias, eps);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy_any, InputGradients& dx) const {
    const Tensor& x = saved.input(0);
    const Tensor weight = has_weight ? saved.input(1) : Tensor();
    if (is_grad_enabled()) return backward_by_ops(x, weight, dy_any, dx);
    const Tensor dy = in_order_of(x, dy_any);
    const Tensor sums = empty(statistics.shape(), {.dtype = DType::f64, .device = x.device()});
    kernels::batch_norm_sums.on(x.device())(sums, dy, x, statistics);
    if (dx.needed(0)) {
      Tensor g = empty_like(x);
      kernels::batch_norm_backward.on(x.device())(g, dy, x, statistics, sums, weight, count, eps);
      dx.set(0, std::move(g));
    }
    if (dx.needed(1)) dx.set(1, (sums[1] / sqrt(statistics[1] + eps)).to(x.dtype()));
    if (dx.needed(2)) dx.set(2, sums[0].to(x.dtype()));
  }

  void backward_by_ops(const Tensor& x, const Tensor& weight, const Tensor& dy,
                       InputGradients& dx) const {
    Shape others, per_channel = Shape::filled(
                      x.dim(), 1);  // all dimensions but the channels'; [1, C, 1, ...]
    for (int d = 0; d < x.dim(); ++d)
      if (d != 1) others.push_back(d);
    per_channel[1] = x.size(1);
    Tensor centre, variance;
    if (by_batch) {
      centre = mean(x, others, true);
      variance = mean(square(x - centre), others, true);
    } else {
      centre = statistics[0].to(x.dtype()).reshape(per_channel);
      variance = statistics[1].to(x.dtype()).reshape(per_channel);
    }
    const Tensor rstd = 1.0 / sqrt(variance + eps);
    const Tensor normal = (x - centre) * rstd;
    if (dx.needed(0)) {
      Tensor g = has_weight ? dy * weight.reshape(per_channel) : dy;
      if (by_batch) g = g - mean(g, others, true) - normal * mean(g * normal, others, true);
      dx.set(0, g * rstd);
    }
    if (dx.needed(1)) dx.set(1, sum(dy * normal, others));
    if (dx.needed(2)) dx.set(2, sum(dy, others));
  }
};

}  // namespace

Tensor batch_norm(const Tensor& x, Tensor running_mean, Tensor running_var, const Tensor& weight,
                  const Tensor& bias, bool training, double momentum, double eps) {
  LOCKSTEP_CHECK(x.dim() >= 2, ShapeError, "batch_norm: the input is [N, C] or [N, C, ...], got ",
                 x.shape());
  LOCKSTEP_CHECK(running_mean.defined() == running_var.defined(), ValueError,
                 "batch_norm: running_mean and running_var come together");
  const int64_t channels = x.size(1);
  for (const Tensor* t :
       std::initializer_list<const Tensor*>{&running_mean, &running_var, &weight, &bias}) {
    if (!t->defined()) continue;
    LOCKSTEP_CHECK(t->shape() == Shape{channels}, ShapeError, "batch_norm: the input ", x.shape(),
                   " has ", channels, " channels; weight, bias and running statistics have shape [",
                   channels, "], got ", t->shape());
    LOCKSTEP_CHECK(t->dtype() == x.dtype(), DTypeError, "batch_norm: the input is ", x.dtype(),
                   "; weight, bias and running statistics too, got ", t->dtype());
  }
  const bool by_batch = training || !running_mean.defined();
  LOCKSTEP_CHECK(!training || x.numel() != channels, ShapeError,
                 "batch_norm: training needs more than one value per channel, got ", x.shape());
  const bool dense = x.is_contiguous() || x.is_channels_last();
  return apply(BatchNorm{running_mean, running_var, by_batch, weight.defined(), momentum, eps},
               dense ? x : x.contiguous(), weight.defined() ? weight.contiguous() : weight,
               bias.defined() ? bias.contiguous() : bias);
}

}  // namespace lockstep

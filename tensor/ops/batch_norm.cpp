#include <lockstep/tensor/ops/batch_norm.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/range_scale.h>
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

/// Combines the statistics [3, C] of this rank's `count` values per channel with those of the other
/// ranks, in rank order, and returns the count of all (Chan, Golub and LeVeque, 1979).
double combine(BatchNormReduction& shared, const Tensor& statistics, double count) {
  using W = long double;  // squares of f64 deviations neither overflow nor vanish
  const auto channels = static_cast<size_t>(statistics.size(1));
  const Tensor mine = empty({1 + statistics.numel()}, {.dtype = DType::f64});  // the count first
  mine.data<double>()[0] = count;
  Tensor(mine.narrow(0, 1, statistics.numel())).copy_(statistics.view({statistics.numel()}));
  const Tensor all = shared.gather(mine).contiguous();  // [ranks, 1 + 3 C]
  std::vector<W> means(channels), variances(channels);
  double total = 0;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const double* theirs = all.data<double>() + rank * all.size(1);
    const double n = *theirs++;
    if (n == 0) continue;
    const double share = n / (total + n);
    for (size_t c = 0; c < channels; ++c) {
      const W mean = static_cast<W>(theirs[c]) + theirs[2 * channels + c], delta = mean - means[c];
      const W deviation = theirs[channels + c];
      means[c] += delta * share;
      variances[c] += (deviation * deviation - variances[c]) * share +
                      delta * delta * share * (1 - share);
    }
    total += n;
  }
  double* result = statistics.data<double>();
  for (size_t c = 0; c < channels; ++c) {
    result[c] = static_cast<double>(means[c]);
    result[channels + c] = static_cast<double>(std::sqrt(variances[c]));
    result[2 * channels + c] = static_cast<double>(means[c] - result[c]);
  }
  return total;
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
  Tensor running_mean, running_var;
  bool by_batch, has_weight;
  double momentum, eps;
  std::shared_ptr<BatchNormReduction> shared;
  double count =
      std::numeric_limits<double>::infinity();  // values per channel behind the statistics

  Tensor forward(Saver& saved, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    Tensor statistics =  // [3, C]: means, deviations, what rounding took from the means
        empty({3, x.size(1)}, {.dtype = DType::f64, .device = x.device()});
    if (by_batch) {
      kernels::batch_norm_statistics.on(x.device())(statistics, x);
      count = static_cast<double>(values_per_channel(x));
      if (shared) {
        const double own = count;
        count = combine(*shared, statistics, own);
        LOCKSTEP_CHECK(count >= 2, ShapeError,
                       "batch_norm: training needs more than one value per channel, and all ranks "
                       "together have ",
                       count, "; this one has ", own, " in ", x.shape());
      }
      if (running_mean.defined() && count > 0) {
        const Tensor mean = statistics[0].to(running_mean.dtype()),
                     var = square(statistics[1]).to(running_var.dtype());
        running_mean.mul_(1 - momentum).add_(mean, momentum);
        running_var.mul_(1 - momentum).add_(var, momentum * (count / (count - 1)));
      }
    } else {
      statistics.zero_();
      statistics.select(0, 0).copy_(running_mean);
      statistics.select(0, 1).copy_(sqrt(running_var.to(DType::f64)));
    }
    running_mean = running_var = Tensor();
    saved.keep(0, statistics);
    Tensor y = empty_like(x);
    kernels::batch_norm.on(x.device())(y, x, statistics, weight, bias, eps);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy_any, InputGradients& dx) const {
    const Tensor x = saved.input(0), statistics = saved.kept(0);
    const Tensor weight = has_weight ? saved.input(1) : Tensor();
    if (is_grad_enabled()) return backward_by_ops(x, weight, statistics, dy_any, dx);
    const Tensor dy = in_order_of(x, dy_any);
    const Tensor sums = empty({2, x.size(1)}, {.dtype = DType::f64, .device = x.device()});
    kernels::batch_norm_sums.on(x.device())(sums, dy, x, statistics, eps);
    Tensor sums_of_all = sums;
    if (shared) {  // also where this rank needs no dx: another one may
      sums_of_all = sums.clone();
      shared->sum(sums_of_all);
    }
    if (dx.needed(0)) {
      Tensor g = empty_like(x);
      kernels::batch_norm_backward.on(x.device())(g, dy, x, statistics, sums_of_all, weight, count,
                                                  eps);
      dx.set(0, std::move(g));
    }
    if (dx.needed(1)) dx.set(1, sums[1].to(x.dtype()));
    if (dx.needed(2)) dx.set(2, sums[0].to(x.dtype()));
  }

  void backward_by_ops(const Tensor& x, const Tensor& weight, const Tensor& statistics,
                       const Tensor& dy, InputGradients& dx) const {
    Shape others, per_channel = Shape::filled(
                      x.dim(), 1);  // all dimensions but the channels'; [1, C, 1, ...]
    for (int d = 0; d < x.dim(); ++d)
      if (d != 1) others.push_back(d);
    per_channel[1] = x.size(1);
    const auto over_batch = [&](const Tensor& t) {  // [1, C, 1, ...]
      if (!shared) return mean(t, others, true);
      return apply(SharedSum{shared}, sum(t, others, true)) / count;
    };
    const Tensor deviation = statistics[1].to(x.dtype()).reshape(per_channel);
    const Tensor range = detail::range_scale(maximum(deviation, std::sqrt(eps)));
    const Tensor scaled = x * range;
    Tensor centred, variance;
    double shrink = 1;  // of centred, so that running statistics far from x do not overflow it
    if (by_batch) {
      const Tensor about_mean = scaled - over_batch(scaled);
      centred = about_mean - over_batch(about_mean);  // the mean was rounded
      variance = over_batch(square(centred));
    } else {
      const Tensor center = statistics[0].to(x.dtype()).reshape(per_channel);
      shrink = std::min(detail::magnitude_scale(x), detail::magnitude_scale(center));
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
      if (dx.needed(0)) dx.set(0, has_weight ? g * weight.reshape(per_channel) : g);
    }
    if (dx.needed(1)) dx.set(1, sum(dy * normal, others) * (1 / shrink));
    if (dx.needed(2)) dx.set(2, sum(dy, others));
  }
};

}  // namespace

Tensor batch_norm(const Tensor& x, Tensor running_mean, Tensor running_var, const Tensor& weight,
                  const Tensor& bias, bool training, double momentum, double eps,
                  std::shared_ptr<BatchNormReduction> shared) {
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
    LOCKSTEP_CHECK(t->dtype() == x.dtype(), DTypeError, "batch_norm: the input is ", x.dtype(),
                   "; weight, bias and running statistics too, got ", t->dtype());
  }
  const bool by_batch = training || !running_mean.defined();
  if (!training) shared = nullptr;
  LOCKSTEP_CHECK(!training || shared || values_per_channel(x) != 1, ShapeError,
                 "batch_norm: training needs more than one value per channel, got ", x.shape());
  const bool dense = x.is_contiguous() || x.is_channels_last();
  return apply(BatchNorm{running_mean, running_var, by_batch, weight.defined(), momentum, eps,
                         std::move(shared)},
               dense ? x : x.contiguous(), weight.defined() ? weight.contiguous() : weight,
               bias.defined() ? bias.contiguous() : bias);
}

}  // namespace lockstep

#include <lockstep/nn/init.h>

#include <cmath>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/random.h>

namespace lockstep::nn::init {
namespace {

/// t = draw * scale + shift, for a fresh draw in t's shape and dtype.
Tensor assign(const Tensor& t, Tensor draw, double scale, double shift) {
  const NoGradGuard guard;
  Tensor target = t;
  target.copy_(draw.mul_(scale).add_(shift));
  return t;
}

double fan_std(const Tensor& t, const KaimingOptions& o) {
  const Fans f = fans(t);
  return calculate_gain(o.nonlinearity, o.a) /
         std::sqrt(static_cast<double>(o.mode == FanMode::in ? f.in : f.out));
}
double xavier_std(const Tensor& t, double gain) {
  const Fans f = fans(t);
  return gain * std::sqrt(2.0 / static_cast<double>(f.in + f.out));
}
Tensor symmetric(const Tensor& t, double bound) { return uniform_(t, -bound, bound); }

}  // namespace

Tensor uniform_(const Tensor& t, double low, double high) {
  LOCKSTEP_CHECK(low <= high, ValueError, "uniform_: low ", low, " is above high ", high);
  return assign(t, rand(t.shape(), {.dtype = t.dtype(), .device = t.device()}), high - low, low);
}
Tensor normal_(const Tensor& t, double mean, double std) {
  LOCKSTEP_CHECK(std >= 0, ValueError, "normal_: std ", std, " is negative");
  return assign(t, randn(t.shape(), {.dtype = t.dtype(), .device = t.device()}), std, mean);
}

Tensor trunc_normal_(const Tensor& t, double mean, double std, double low, double high) {
  LOCKSTEP_CHECK(std > 0 && low < high, ValueError,
                 "trunc_normal_: needs std > 0 and low < high, got std ", std, ", low ", low,
                 ", high ", high);
  // Inversion: a uniform draw between the distribution's values at the bounds, mapped back by
  // bisection, which is as exact as erf and good to the last bit anywhere between the bounds.
  const double a = (low - mean) / std, b = (high - mean) / std;
  auto cdf = [](double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); };
  const double from = cdf(a), to = cdf(b);
  const Tensor draw = rand(t.shape(), {.dtype = DType::f64});
  double* p = draw.data<double>();
  for (int64_t i = 0; i < draw.numel(); ++i) {
    const double target = from + (to - from) * p[i];
    double lo = a, hi = b;
    for (int step = 0; step < 60 && lo < hi; ++step) {
      const double middle = 0.5 * (lo + hi);
      (cdf(middle) < target ? lo : hi) = middle;
    }
    p[i] = lo;
  }
  return assign(t, draw, std, mean);
}

Tensor constant_(const Tensor& t, double value) {
  const NoGradGuard guard;
  Tensor target = t;
  target.fill_(value);
  return t;
}
Tensor zeros_(const Tensor& t) { return constant_(t, 0); }
Tensor ones_(const Tensor& t) { return constant_(t, 1); }

Fans fans(const Tensor& weight) {
  LOCKSTEP_CHECK(weight.dim() >= 2, ShapeError,
                 "init: fan in and out need a weight of two or more dimensions, got shape ",
                 weight.shape());
  int64_t kernel = 1;
  for (int i = 2; i < weight.dim(); ++i) kernel *= weight.shape()[i];
  return {weight.size(1) * kernel, weight.size(0) * kernel};
}

double calculate_gain(Nonlinearity f, double slope) {
  switch (f) {
    case Nonlinearity::tanh:
      return 5.0 / 3;
    case Nonlinearity::relu:
      return std::sqrt(2.0);
    case Nonlinearity::leaky_relu:
      return std::sqrt(2 / (1 + slope * slope));
    case Nonlinearity::selu:
      return 0.75;
    default:
      return 1;
  }
}

Tensor kaiming_uniform_(const Tensor& t, KaimingOptions o) {
  return symmetric(t, std::sqrt(3.0) * fan_std(t, o));
}
Tensor kaiming_normal_(const Tensor& t, KaimingOptions o) { return normal_(t, 0, fan_std(t, o)); }
Tensor xavier_uniform_(const Tensor& t, double gain) {
  return symmetric(t, std::sqrt(3.0) * xavier_std(t, gain));
}
Tensor xavier_normal_(const Tensor& t, double gain) { return normal_(t, 0, xavier_std(t, gain)); }

}  // namespace lockstep::nn::init

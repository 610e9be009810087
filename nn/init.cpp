#include <lockstep/nn/init.h>

#include <cmath>
#include <limits>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/random.h>

namespace lockstep::nn::init {
namespace {

/// t = draw * scale + shift, for a draw in t's shape.
Tensor assign(const Tensor& t, Tensor draw, double scale, double shift) {
  const NoGradGuard guard;
  Tensor target = t;
  target.copy_(draw.mul_(scale).add_(shift));
  return t;
}
/// How a draw for t is made and scaled. One for a two-byte float is made in f32: it has more values
/// than a draw in its own dtype reaches, most of them near 0.
TensorOptions drawn_like(const char* op, const Tensor& t) {
  LOCKSTEP_CHECK(t.is_floating_point(), DTypeError, op, ": needs a floating dtype, got ",
                 t.dtype());
  return {.dtype = t.dtype() == DType::f64 ? DType::f64 : DType::f32, .device = t.device()};
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
  const double largest = t.dtype() == DType::f64 ? std::numeric_limits<double>::max()
                                                 : std::numeric_limits<float>::max();
  LOCKSTEP_CHECK(t.numel() == 0 || high - low <= largest, ValueError, "uniform_: the range ", low,
                 " .. ", high, " is wider than the largest number of ", t.dtype());
  return assign(t, rand(t.shape(), drawn_like("uniform_", t)), high - low, low);
}
Tensor normal_(const Tensor& t, double mean, double std) {
  LOCKSTEP_CHECK(std >= 0, ValueError, "normal_: std ", std, " is negative");
  return assign(t, randn(t.shape(), drawn_like("normal_", t)), std, mean);
}

Tensor trunc_normal_(const Tensor& t, double mean, double std, double low, double high) {
  LOCKSTEP_CHECK(std > 0 && low < high, ValueError,
                 "trunc_normal_: needs std > 0 and low < high, got std ", std, ", low ", low,
                 ", high ", high);
  TensorOptions options = drawn_like("trunc_normal_", t);
  options.dtype = DType::f64;
  const Tensor draw = empty(t.shape(), options);
  kernels::trunc_normal(draw, mean, std, low, high, default_generator().draw());
  return assign(t, draw, 1, 0);
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

// What each element-wise op should compute, written with <cmath> and independently of the formulas:
// the judge of ops_test.cpp. An op of the lists in formulas-inl.h without a Reference does not
// compile.
//   f         the function on doubles
//   call      the public function that users call
//   in_place  its form with the underscore, where there is one
//   cases()   parameters to try (ops with fields)
//   low, high where derivatives are checked, at least 0.05 away from kinks()
// clang-format off
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/formula_traits.h>

namespace reference {

using namespace lockstep;
namespace ops = lockstep::formulas;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// In the tail the rounding of x / sqrt(2) counts x^2 times, so it is done in more digits.
inline long double normal_cdf(long double x) { return std::erfc(-x / std::sqrt(2.0L)) / 2; }

struct Defaults {
  static constexpr double low = -3, high = 3;
  static constexpr double slack = 0;  // absolute error allowed beside the relative one, times 2^-24
  static std::vector<double> kinks() { return {}; }
};
struct KinkAtZero : Defaults {
  static std::vector<double> kinks() { return {0}; }
};

template <class Op>
struct Reference;

template <> struct Reference<ops::Relu> : KinkAtZero {
  static double f(ops::Relu, double x) { return std::isnan(x) || x > 0 ? x : 0; }
  static Tensor call(ops::Relu, const Tensor& x) { return relu(x); }
  static void in_place(ops::Relu, Tensor& x) { relu_(x); }
};
template <> struct Reference<ops::Sigmoid> : Defaults {
  static double f(ops::Sigmoid, double x) { return 1 / (1 + std::exp(-x)); }
  static Tensor call(ops::Sigmoid, const Tensor& x) { return sigmoid(x); }
  static void in_place(ops::Sigmoid, Tensor& x) { sigmoid_(x); }
};
template <> struct Reference<ops::Tanh> : Defaults {
  static double f(ops::Tanh, double x) { return std::tanh(x); }
  static Tensor call(ops::Tanh, const Tensor& x) { return tanh(x); }
  static void in_place(ops::Tanh, Tensor& x) { tanh_(x); }
};
template <> struct Reference<ops::Exp> : Defaults {
  static double f(ops::Exp, double x) { return std::exp(x); }
  static Tensor call(ops::Exp, const Tensor& x) { return exp(x); }
  static void in_place(ops::Exp, Tensor& x) { exp_(x); }
};
template <> struct Reference<ops::Log> : Defaults {
  static constexpr double low = 0.3;
  static double f(ops::Log, double x) { return std::log(x); }
  static Tensor call(ops::Log, const Tensor& x) { return log(x); }
};
template <> struct Reference<ops::Sqrt> : Defaults {
  static constexpr double low = 0.3;
  static double f(ops::Sqrt, double x) { return std::sqrt(x); }
  static Tensor call(ops::Sqrt, const Tensor& x) { return sqrt(x); }
  static void in_place(ops::Sqrt, Tensor& x) { sqrt_(x); }
};
template <> struct Reference<ops::Abs> : KinkAtZero {
  static double f(ops::Abs, double x) { return std::fabs(x); }
  static Tensor call(ops::Abs, const Tensor& x) { return abs(x); }
  static void in_place(ops::Abs, Tensor& x) { abs_(x); }
};
template <> struct Reference<ops::Neg> : Defaults {
  static double f(ops::Neg, double x) { return -x; }
  static Tensor call(ops::Neg, const Tensor& x) { return -x; }
  static void in_place(ops::Neg, Tensor& x) { neg_(x); }
};
template <> struct Reference<ops::Square> : Defaults {
  static double f(ops::Square, double x) { return x * x; }
  static Tensor call(ops::Square, const Tensor& x) { return square(x); }
};
template <> struct Reference<ops::Silu> : Defaults {
  static double f(ops::Silu, double x) { return x == -kInfinity ? 0 : x / (1 + std::exp(-x)); }
  static Tensor call(ops::Silu, const Tensor& x) { return silu(x); }
};
template <> struct Reference<ops::Erf> : Defaults {
  static double f(ops::Erf, double x) { return std::erf(x); }
  static Tensor call(ops::Erf, const Tensor& x) { return erf(x); }
};
template <> struct Reference<ops::Softplus> : Defaults {
  static double f(ops::Softplus, double x) {
    return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
  }
  static Tensor call(ops::Softplus, const Tensor& x) { return softplus(x); }
};
template <> struct Reference<ops::Gaussian> : Defaults {
  static double f(ops::Gaussian, double x) { return std::exp(-x * x / 2); }
  static Tensor call(ops::Gaussian, const Tensor& x) { return gaussian(x); }
};
template <> struct Reference<ops::Ndtr> : Defaults {
  static double f(ops::Ndtr, double x) { return static_cast<double>(normal_cdf(x)); }
  static Tensor call(ops::Ndtr, const Tensor& x) { return ndtr(x); }
};
template <> struct Reference<ops::Gelu> : Defaults {
  static double f(ops::Gelu, double x) {
    return x == -kInfinity ? 0 : static_cast<double>(x * normal_cdf(x));
  }
  static Tensor call(ops::Gelu, const Tensor& x) { return gelu(x); }
};
template <> struct Reference<ops::LeakyRelu> : KinkAtZero {
  static std::vector<ops::LeakyRelu> cases() { return {{{}, 0.01}, {{}, 0.3}, {{}, -0.5}}; }
  static double f(ops::LeakyRelu op, double x) { return x > 0 ? x : op.slope.value * x; }
  static Tensor call(ops::LeakyRelu op, const Tensor& x) { return leaky_relu(x, op.slope.value); }
  static void in_place(ops::LeakyRelu op, Tensor& x) { leaky_relu_(x, op.slope.value); }
};
template <> struct Reference<ops::Clamp> : Defaults {
  static std::vector<ops::Clamp> cases() { return {{{}, -1, 2}, {{}, -1.5, 1.5}}; }
  static std::vector<double> kinks() { return {-1, 2, -1.5, 1.5}; }
  static double f(ops::Clamp op, double x) {
    if (x < op.low.value) return op.low.value;
    return x > op.high.value ? op.high.value : x;
  }
  static Tensor call(ops::Clamp op, const Tensor& x) { return clamp(x, op.low, op.high); }
  static void in_place(ops::Clamp op, Tensor& x) { clamp_(x, op.low, op.high); }
};
template <> struct Reference<ops::Pow> : Defaults {
  static constexpr double low = 0.6;
  static std::vector<ops::Pow> cases() {
    return {{{}, 0},    {{}, 1},    {{}, 2},   {{}, 3},   {{}, 5},
            {{}, -1.0}, {{}, -2.0}, {{}, 0.5}, {{}, -0.5}, {{}, 2.5}, {{}, -1.25}};
  }
  static double f(ops::Pow op, double x) { return std::pow(x, op.exponent.value); }
  static Tensor call(ops::Pow op, const Tensor& x) { return pow(x, op.exponent); }
};
template <> struct Reference<ops::LogicalNot> : Defaults {
  static double f(ops::LogicalNot, double x) { return x == 0; }
  static Tensor call(ops::LogicalNot, const Tensor& x) { return logical_not(x); }
};

// ---- three inputs ----

template <> struct Reference<ops::Lerp> : Defaults {
  static constexpr double slack = 24;  // a and w (b - a) may cancel
  static double f(ops::Lerp, double a, double b, double w) { return a + w * (b - a); }
  static Tensor call(ops::Lerp, const Tensor& a, const Tensor& b, const Tensor& w) { return lerp(a, b, w); }
};
template <> struct Reference<ops::Addcmul> : Defaults {
  static constexpr double slack = 300;  // values up to 10: a and the product may cancel
  static std::vector<ops::Addcmul> cases() { return {{{}, 1}, {{}, -2}}; }
  static double f(ops::Addcmul op, double a, double b, double c) { return a + op.value.value * b * c; }
  static Tensor call(ops::Addcmul op, const Tensor& a, const Tensor& b, const Tensor& c) {
    return addcmul(a, b, c, op.value);
  }
};

// ---- two inputs; A and B are tensors, or one of them is a number ----

template <> struct Reference<ops::Add> : Defaults {
  static double f(ops::Add, double a, double b) { return a + b; }
  template <class A, class B> static Tensor call(ops::Add, const A& a, const B& b) { return a + b; }
  static void in_place(ops::Add, Tensor& a, const Tensor& b) { a.add_(b); }
};
template <> struct Reference<ops::AddScaled> : Defaults {
  static constexpr double slack = 16;  // the two terms may cancel
  static std::vector<ops::AddScaled> cases() { return {{{}, 3}, {{}, -0.75}}; }
  static double f(ops::AddScaled op, double a, double b) { return a + op.alpha.value * b; }
  /// There is no out-of-place form; the expectation of its dtype is the in-place one's.
  static Tensor call(ops::AddScaled op, const Tensor& a, const Tensor& b) {
    Tensor y = a.expand(broadcast_shapes("add", a.shape(), b.shape())).clone();
    return y.add_(b, op.alpha.value);
  }
  static void in_place(ops::AddScaled op, Tensor& a, const Tensor& b) { a.add_(b, op.alpha.value); }
};
template <> struct Reference<ops::Sub> : Defaults {
  static double f(ops::Sub, double a, double b) { return a - b; }
  template <class A, class B> static Tensor call(ops::Sub, const A& a, const B& b) { return a - b; }
};
template <> struct Reference<ops::Mul> : Defaults {
  static double f(ops::Mul, double a, double b) { return a * b; }
  template <class A, class B> static Tensor call(ops::Mul, const A& a, const B& b) { return a * b; }
  static void in_place(ops::Mul, Tensor& a, const Tensor& b) { a.mul_(b); }
};
template <> struct Reference<ops::Div> : Defaults {
  static constexpr double low = 0.4;
  static double f(ops::Div, double a, double b) { return a / b; }
  template <class A, class B> static Tensor call(ops::Div, const A& a, const B& b) { return a / b; }
  static void in_place(ops::Div, Tensor& a, const Tensor& b) { div_(a, b); }
};
template <> struct Reference<ops::Maximum> : Defaults {
  static double f(ops::Maximum, double a, double b) { return std::isnan(a) || a > b ? a : b; }
  template <class A, class B> static Tensor call(ops::Maximum, const A& a, const B& b) {
    return maximum(a, b);
  }
};
template <> struct Reference<ops::Minimum> : Defaults {
  static double f(ops::Minimum, double a, double b) { return std::isnan(a) || a < b ? a : b; }
  template <class A, class B> static Tensor call(ops::Minimum, const A& a, const B& b) {
    return minimum(a, b);
  }
};

template <> struct Reference<ops::Eq> : Defaults {
  static double f(ops::Eq, double a, double b) { return a == b; }
  template <class B> static Tensor call(ops::Eq, const Tensor& a, const B& b) { return eq(a, b); }
};
template <> struct Reference<ops::Ne> : Defaults {
  static double f(ops::Ne, double a, double b) { return a != b; }
  template <class B> static Tensor call(ops::Ne, const Tensor& a, const B& b) { return ne(a, b); }
};
template <> struct Reference<ops::Lt> : Defaults {
  static double f(ops::Lt, double a, double b) { return a < b; }
  template <class B> static Tensor call(ops::Lt, const Tensor& a, const B& b) { return lt(a, b); }
};
template <> struct Reference<ops::Le> : Defaults {
  static double f(ops::Le, double a, double b) { return a <= b; }
  template <class B> static Tensor call(ops::Le, const Tensor& a, const B& b) { return le(a, b); }
};
template <> struct Reference<ops::Gt> : Defaults {
  static double f(ops::Gt, double a, double b) { return a > b; }
  template <class B> static Tensor call(ops::Gt, const Tensor& a, const B& b) { return gt(a, b); }
};
template <> struct Reference<ops::Ge> : Defaults {
  static double f(ops::Ge, double a, double b) { return a >= b; }
  template <class B> static Tensor call(ops::Ge, const Tensor& a, const B& b) { return ge(a, b); }
};

// ---- with a number ----

template <class Op> struct Reference<ops::WithRight<Op>> : Reference<Op> {
  using W = ops::WithRight<Op>;
  static std::vector<W> cases() { return {{{}, 2}, {{}, 0.75}}; }
  static std::vector<double> kinks() { return {2, 0.75}; }
  static double f(W op, double x) { return Reference<Op>::f(Op(), x, op.number.value); }
  static Tensor call(W op, const Tensor& x) { return Reference<Op>::call(Op(), x, op.number); }
  static void in_place(W op, Tensor& x) requires std::is_same_v<Op, ops::Add> {
    x.add_(op.number.value);
  }
  static void in_place(W op, Tensor& x) requires std::is_same_v<Op, ops::Mul> {
    x.mul_(op.number.value);
  }
  static void in_place(W op, Tensor& x) requires std::is_same_v<Op, ops::Div> {
    div_(x, op.number);
  }
};
template <class Op> struct Reference<ops::WithLeft<Op>> : Reference<Op> {
  using W = ops::WithLeft<Op>;
  static std::vector<W> cases() { return {{{}, 2}, {{}, 0.75}}; }
  static double f(W op, double x) { return Reference<Op>::f(Op(), op.number.value, x); }
  static Tensor call(W op, const Tensor& x) { return Reference<Op>::call(Op(), op.number, x); }
  static void in_place(W, Tensor&) = delete;
};

}  // namespace reference

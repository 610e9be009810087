// The errors of the one-input ops and of their derivatives, in units in the last place (ulp) of the
// exact result, against the bounds that ops/elementwise.h states: f32 against f64 on every 997th bit
// pattern, or on all with LOCKSTEP_ACCURACY=all (an hour); f64 against long double by samples. The
// tests *_avx2, *_sse4 and *_scalar run the same on lesser instruction sets. LOCKSTEP_ACCURACY=print
// prints the largest errors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;

namespace {

bool mode_is(std::string_view mode) {
  const char* value = std::getenv("LOCKSTEP_ACCURACY");
  return value && value == mode;
}

/// The type that judges T.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 4, double, long double>;

// ---- inputs ----

/// Calls f with vectors of at most a million inputs; `sparse` takes fewer.
template <class T>
void for_inputs(bool sparse, const std::function<void(const std::vector<T>&)>& f) {
  constexpr size_t kChunk = 1 << 20;
  std::vector<T> x;
  const auto give = [&](T v) {
    x.push_back(v);
    if (x.size() < kChunk) return;
    f(x);
    x.clear();
  };
  for (T v : {T(0), T(1), T(0.5), std::numeric_limits<T>::infinity(),
              std::numeric_limits<T>::denorm_min(), std::numeric_limits<T>::min(),
              std::numeric_limits<T>::max()}) {
    give(v);
    give(-v);
  }
  give(std::numeric_limits<T>::quiet_NaN());
  if constexpr (sizeof(T) == 4) {
    const uint64_t step = mode_is("all") ? 1 : sparse ? 997 * 8 + 1 : 997;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step) {
      const uint32_t pattern = static_cast<uint32_t>(bits);
      T v;
      std::memcpy(&v, &pattern, sizeof v);
      give(v);
    }
  } else {
    std::mt19937_64 random(5);
    const int64_t count = (sparse ? 20000 : 100000) * (mode_is("all") ? 100 : 1);
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t pattern = random();
      T v;
      std::memcpy(&v, &pattern, sizeof v);
      give(v);
      // Where functions bend, and where their tails end.
      const T unit = static_cast<T>(2 * (static_cast<double>(random() >> 11) * 0x1p-53) - 1);
      for (T scale : {T(0.01), T(1), T(8), T(40), T(750)}) give(unit * scale);
    }
  }
  f(x);
}

// ---- errors ----

template <class T>
Wide<T> ulp_of(Wide<T> v) {
  using L = std::numeric_limits<T>;
  int exponent = 0;
  std::frexp(v, &exponent);
  return std::ldexp(Wide<T>(1),
                    std::max(v == 0 ? L::min_exponent : exponent, L::min_exponent) - L::digits);
}
/// |got - want| in ulp of want, or of a larger `term`; infinite where only one is NaN.
template <class T>
double error_in_ulp(T got, Wide<T> want, Wide<T> term) {
  if (got == static_cast<T>(want) && !std::isnan(want)) return 0;  // at most half an ulp
  if (std::isnan(want) || std::isnan(got))
    return std::isnan(want) && std::isnan(got) ? 0 : std::numeric_limits<double>::infinity();
  if (std::isinf(want)) return std::numeric_limits<double>::infinity();
  Wide<T> value = got;
  if (std::isinf(got))  // the number that would follow the largest
    value = std::copysign(std::ldexp(Wide<T>(1), std::numeric_limits<T>::max_exponent), value);
  return static_cast<double>(std::abs(value - want) / std::max(ulp_of<T>(want), ulp_of<T>(term)));
}

template <class T>
struct Worst {
  double error = 0;
  T at = 0, got = 0;
  Wide<T> want = 0;
  void see(double e, T x, T y, Wide<T> exact) {
    if (e > error) error = e, at = x, got = y, want = exact;
  }
  void check(const std::string& name, double bound) const {
    if (mode_is("print"))
      std::printf("%-24s %s %8.3f ulp at %.9g\n", name.c_str(), sizeof(T) == 4 ? "f32" : "f64",
                  error, static_cast<double>(at));
    INFO(name, " at ", static_cast<double>(at), ": ", static_cast<double>(got), ", not ",
         static_cast<double>(want));
    CHECK(error <= bound);
  }
};

using Function = Tensor (*)(Tensor);

/// `exact` takes x as a Wide<T>.
template <class T, class F>
void check_op(const std::string& name, const std::function<Tensor(const Tensor&)>& op, F exact,
              double bound, bool sparse = false) {
  Worst<T> worst;
  for_inputs<T>(sparse, [&](const std::vector<T>& x) {
    const std::vector<T> y = op(tensor(x)).template to_vector<T>();
    for (size_t i = 0; i < x.size(); ++i) {
      const Wide<T> want = exact(static_cast<Wide<T>>(x[i]));
      worst.see(error_in_ulp<T>(y[i], want, 0), x[i], y[i], want);
    }
  });
  worst.check(name, bound);
}
template <class F>
void check_op(const char* name, Function op, F exact, double bound) {
  check_op<float>(name, op, exact, bound);
  check_op<double>(name, op, exact, bound);
}

/// A derivative is the sum of two terms; where they cancel the larger says what an ulp is.
template <class R>
struct Terms {
  R a, b = 0;
};
template <class R>
Terms(R) -> Terms<R>;
template <class R>
Terms(R, R) -> Terms<R>;
/// `exact` takes x and the op's rounded result; `smallest` smallest numbers are allowed beside.
template <class T, class F>
void check_derivative(const std::string& name, Function op, F exact, double bound,
                      double smallest) {
  Worst<T> worst;
  for_inputs<T>(true, [&](const std::vector<T>& values) {
    const Tensor x = tensor(values).requires_grad_(), y = op(x);
    const std::vector<T> ys = y.detach().template to_vector<T>();
    const std::vector<T> dx = autograd::grad({y}, {x}, {ones_like(y)})[0].template to_vector<T>();
    for (size_t i = 0; i < values.size(); ++i) {
      using R = Wide<T>;
      const Terms<R> terms = exact(static_cast<R>(values[i]), static_cast<R>(ys[i]));
      const R want = terms.a + terms.b, larger = std::max(std::abs(terms.a), std::abs(terms.b)),
              term = std::isfinite(larger) ? larger : 0;
      const double allowed =
          smallest * static_cast<double>(std::numeric_limits<T>::denorm_min() /
                                         std::max(ulp_of<T>(want), ulp_of<T>(term)));
      worst.see(error_in_ulp<T>(dx[i], want, term) - allowed, values[i], dx[i], want);
    }
  });
  worst.check(name + "'", bound);
}
template <class F>
void check_derivative(const char* name, Function op, F exact, double bound, double smallest = 0) {
  check_derivative<float>(name, op, exact, bound, smallest);
  check_derivative<double>(name, op, exact, bound, smallest);
}

// ---- exact functions ----

/// a * b, and 0 where b is 0, also for an infinite a: the limits of these functions.
template <class R>
R times(R a, R b) {
  return b == 0 ? 0 : a * b;
}
template <class R>
R sigmoid_of(R x) {
  return 1 / (1 + std::exp(-x));
}
/// exp(-x^2 / 2), with the rounding error of the square.
template <class R>
R gaussian_of(R x) {
  if (std::abs(x) > 100) return 0;
  const R square = x * x, lost = std::fma(x, x, -square);
  return std::exp(-square / 2) * (1 - lost / 2);
}
/// The normal distribution function, with the rounding error of x / sqrt(2), which counts -2 z times
/// in the tail.
template <class R>
R ndtr_of(R x) {
  const R half = std::sqrt(R(0.5)), z = -x * half;
  if (!(std::abs(x) < 100)) return std::isnan(x) ? x : x > 0;
  const R half_lost = std::fma(-half, half, R(0.5)) / (2 * half);
  const R lost = std::fma(-x, half, -z) - x * half_lost;
  return std::erfc(z) / 2 * (z > 1 ? 1 - 2 * z * lost : 1);
}
template <class R>
R density_of(R x) {
  return gaussian_of(x) / std::sqrt(2 * std::acos(R(-1)));
}

}  // namespace

TEST_CASE("sigmoid, tanh, exp and log are within their bounds") {
  check_op(
      "sigmoid", sigmoid, [](auto x) { return sigmoid_of(x); }, 1);
  check_op(
      "tanh", tanh, [](auto x) { return std::tanh(x); }, 1);
  check_op(
      "exp", exp, [](auto x) { return std::exp(x); }, 1);
  check_op(
      "log", log, [](auto x) { return std::log(x); }, 1);
}

TEST_CASE("silu and softplus are within their bounds") {
  check_op(
      "silu", silu, [](auto x) { return times(x, sigmoid_of(x)); }, 1);
  check_op(
      "softplus", softplus,
      [](auto x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }, 2);
}

TEST_CASE("erf, gaussian, ndtr and gelu are within their bounds") {
  check_op(
      "erf", erf, [](auto x) { return std::erf(x); }, 1.5);
  check_op(
      "gaussian", gaussian, [](auto x) { return std::isnan(x) ? x : gaussian_of(x); }, 1);
  check_op(
      "ndtr", ndtr, [](auto x) { return ndtr_of(x); }, 1.5);
  check_op(
      "gelu", gelu, [](auto x) { return times(x, ndtr_of(x)); }, 1.5);
}

TEST_CASE("relu, sqrt, abs, neg, square, clamp and leaky_relu are rounded once") {
  check_op(
      "relu", relu, [](auto x) { return x < 0 ? decltype(x)(0) : x; }, 0);
  check_op(
      "sqrt", sqrt, [](auto x) { return std::sqrt(x); }, 0.501);
  check_op(
      "abs", abs, [](auto x) { return std::abs(x); }, 0);
  check_op(
      "neg", neg, [](auto x) { return -x; }, 0);
  check_op(
      "square", square, [](auto x) { return x * x; }, 0.501);
  check_op(
      "clamp", [](Tensor x) { return clamp(x, -1, 2.5); },
      [](auto x) {
        using R = decltype(x);
        return x < -1 ? R(-1) : x > R(2.5) ? R(2.5) : x;
      },
      0);
  check_op(
      "leaky_relu", [](Tensor x) { return leaky_relu(x, 0.25); },
      [](auto x) { return x > 0 ? x : x / 4; }, 0.501);
}

TEST_CASE("pow is within its bound") {
  for (double p : {0.0, 1.0, 2.0, 3.0, 4.0, 7.0, -1.0, -2.0, -3.0, 0.5, -0.5, 1.5, 2.5, -1.25, 0.1,
                   65.0, -100.0, 1e6}) {
    const std::string name = "pow " + std::to_string(p);
    const auto op = [p](const Tensor& x) { return pow(x, p); };
    const auto exact = [p](auto x) { return std::pow(x, static_cast<decltype(x)>(p)); };
    check_op<float>(name, op, exact, 1.5, true);
    check_op<double>(name, op, exact, 1.5, true);
  }
}

TEST_CASE("derivatives of one-input ops are within their bounds") {
  // Of what they read, x or the rounded y.
  check_derivative(
      "sigmoid", sigmoid, [](auto, auto y) { return Terms{y * (1 - y)}; }, 1.501);
  check_derivative(
      "tanh", tanh, [](auto, auto y) { return Terms{(1 - y) * (1 + y)}; }, 2);
  check_derivative(
      "exp", exp, [](auto, auto y) { return Terms{y}; }, 0);
  check_derivative(
      "log", log, [](auto x, auto) { return Terms{1 / x}; }, 0.501);
  check_derivative(
      "sqrt", sqrt, [](auto, auto y) { return Terms{1 / (2 * y)}; }, 0.501);
  check_derivative(
      "square", square, [](auto x, auto) { return Terms{2 * x}; }, 0);
  check_derivative(
      "silu", silu,
      [](auto x, auto) {
        const auto s = sigmoid_of(x);
        return Terms{s, times(x, s * sigmoid_of(-x))};
      },
      2.5);
  check_derivative(
      "softplus", softplus, [](auto x, auto) { return Terms{sigmoid_of(x)}; }, 1);
  check_derivative(
      "gaussian", gaussian, [](auto x, auto y) { return Terms{times(-x, y)}; }, 1);
  check_derivative(
      "erf", erf,
      [](auto x, auto) {
        const auto g = gaussian_of(x);
        return Terms{std::isnan(x) ? x : g * g * 2 / std::sqrt(std::acos(decltype(x)(-1)))};
      },
      4.5);
  check_derivative(
      "ndtr", ndtr, [](auto x, auto) { return Terms{std::isnan(x) ? x : density_of(x)}; }, 2.5);
  check_derivative(
      "gelu", gelu,
      [](auto x, auto) {
        return Terms{ndtr_of(x), times(x, density_of(x))};
      },
      3.5, 8);
}

namespace {

template <class T, class Op, class F>
void check_pairs(const char* name, Op op, F exact) {
  std::mt19937_64 random(9);
  std::vector<T> a, b;
  for (int i = 0; i < 300000; ++i)
    for (std::vector<T>* v : {&a, &b}) {
      const uint64_t bits = random();
      T x;
      std::memcpy(&x, &bits, sizeof x);
      if (i % 2) x = static_cast<T>(static_cast<double>(bits >> 11) * 0x1p-53);
      v->push_back(x);
    }
  const std::vector<T> y = op(tensor(a), tensor(b)).template to_vector<T>();
  Worst<T> worst;
  for (size_t i = 0; i < a.size(); ++i) {
    const Wide<T> want = exact(static_cast<Wide<T>>(a[i]), static_cast<Wide<T>>(b[i]));
    worst.see(error_in_ulp<T>(y[i], want, 0), a[i], y[i], want);
  }
  worst.check(name, 0.501);
}

}  // namespace

TEST_CASE("add, sub, mul, div, maximum and minimum are rounded once") {
  const auto check = [](const char* name, Tensor (*op)(const Tensor&, const Tensor&), auto exact) {
    check_pairs<float>(name, op, exact);
    check_pairs<double>(name, op, exact);
  };
  check("add", add, [](auto a, auto b) { return a + b; });
  check("sub", sub, [](auto a, auto b) { return a - b; });
  check("mul", mul, [](auto a, auto b) { return a * b; });
  check("div", div, [](auto a, auto b) { return a / b; });
  check("maximum", maximum, [](auto a, auto b) { return std::isnan(a) || a > b ? a : b; });
  check("minimum", minimum, [](auto a, auto b) { return std::isnan(a) || a < b ? a : b; });
}

TEST_CASE("pow has the special cases of C's pow") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> bases{0.0, -0.0, 1,   -1,   0.5,   -0.5,  2,     -2,
                                  inf, -inf, nan, 1e30, -1e30, 1e-30, -1e-30};
  for (DType t : {DType::f32, DType::f64})
    for (double p :
         {0.0,  -0.0,  1.0, -1.0, 2.0,   -2.0,  3.0,       -3.0,  0.5,    -0.5, 2.5,  -2.5,
          64.0, -64.0, 5.0, 65.0, -65.0, -66.0, 1e17 + 16, 1e300, -1e300, inf,  -inf, nan}) {
      const Tensor x = tensor(bases).to(t);
      const std::vector<double> got = pow(x, p).to_vector<double>();
      for (size_t i = 0; i < bases.size(); ++i) {
        double want = std::pow(x[static_cast<int64_t>(i)].item<double>(), p);
        if (t == DType::f32) want = static_cast<float>(want);
        INFO(name_of(t), " ", bases[i], " to the power ", p, ": ", got[i], ", not ", want);
        if (std::isnan(want))
          CHECK(std::isnan(got[i]));
        else if (std::isinf(want))
          CHECK(got[i] == want);
        else
          CHECK(std::abs(got[i] - want) <= std::abs(want) * 1e-6);
        if (!std::isnan(want)) CHECK(std::signbit(got[i]) == std::signbit(want));
      }
    }
}

// Values of any magnitude against long double: moments and normalisations of numbers that nearly
// agree, of the largest and of denormal ones, with their derivatives, plain and recorded.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/layer_norm.h>
#include <lockstep/tensor/ops/reduce.h>

using namespace lockstep;

namespace {

using Real = long double;
using Reals = std::vector<Real>;

struct Sample {
  std::string name;
  Reals v;             // exact in T
  Real tolerance = 0;  // beside the usual one: what a mean in the next wider type may cost
};

/// n values: uniform in [-1, 1] at each magnitude, and such ones around a centre far away.
template <class T>
std::vector<Sample> samples(size_t n) {
  const Real largest = std::numeric_limits<T>::max();
  std::vector<Sample> all;
  auto add = [&](const std::string& name, Real centre, Real size, Real tolerance = 0) {
    std::mt19937 random(7);
    Sample s{name, {}, tolerance};
    for (size_t i = 0; i < n; ++i) {
      const Real unit = 2 * static_cast<Real>(random()) / 0xffffffffu - 1;
      s.v.push_back(static_cast<T>(centre + size * unit));
    }
    all.push_back(s);
  };
  for (Real size : {Real(1), Real(1e-10), Real(1e-25), Real(1e10), Real(3e19), Real(1e30)})
    add("of size " + std::to_string(static_cast<double>(std::log10(size))), 0, size);
  add("the largest", 0, largest);
  add("near the largest", largest * 0.75L, largest * 0.25L);
  // Here the mean of layer_norm is rounded to the smallest number.
  add("denormal", 0, 300 * static_cast<Real>(std::numeric_limits<T>::denorm_min()), 1e-2L);
  add("the smallest normal", 0, std::numeric_limits<T>::min());
  // Numbers a few units in the last place apart: their mean has eleven more bits for f64.
  const Real apart = 8 * static_cast<Real>(std::numeric_limits<T>::epsilon());
  const Real cost = std::is_same_v<T, float> ? 0 : 2e-4L;
  for (Real centre : {Real(1e6), Real(-3e19), Real(1e-30)})
    add(str_cat("around ", static_cast<double>(centre)), centre, std::fabs(centre) * apart, cost);
  return all;
}

/// Deviations from the first value, which are exact where the values nearly agree, and their mean.
Reals shifted(const Reals& v) {
  Reals d;
  for (Real x : v) d.push_back(x - v[0]);
  return d;
}
Real plain_mean(const Reals& v) {
  Real sum = 0;
  for (Real x : v) sum += x / static_cast<Real>(v.size());
  return sum;
}
Real mean_of(const Reals& v) { return v[0] + plain_mean(shifted(v)); }
/// v minus its mean.
Reals centred(const Reals& v) {
  Reals d = shifted(v);
  const Real mean = plain_mean(d);
  for (Real& x : d) x -= mean;
  return d;
}
Real squares_of(const Reals& v) {  // around the mean
  Real sum = 0;
  for (Real d : centred(v)) sum += d * d;
  return sum;
}
Real largest_of(const Reals& v) {
  Real largest = 0;
  for (Real x : v) largest = std::max(largest, std::fabs(x));
  return largest;
}

template <class T>
Tensor tensor_of(const Reals& v) {
  std::vector<T> values;
  for (Real x : v) values.push_back(static_cast<T>(x));
  return tensor<T>(values);
}

/// got as T is want within `tolerance` of want or of `scale`, with what T cannot hold.
template <class T>
void check(const std::string& what, double got, Real want, Real tolerance, Real scale = 0) {
  CAPTURE(what);
  CAPTURE(static_cast<double>(want));
  const Real least = std::numeric_limits<T>::denorm_min(), most = std::numeric_limits<T>::max();
  const Real allowed = tolerance * std::max(std::fabs(want), scale) + least;
  if (std::fabs(want) > most * (1 + tolerance)) {
    CHECK(std::isinf(got));
    CHECK(std::signbit(got) == std::signbit(want));
  } else if (std::fabs(want) < most * (1 - tolerance)) {
    CHECK(std::fabs(got - want) <= allowed);
  }
}
template <class T>
void check(const std::string& what, const Tensor& got, const Reals& want, Real tolerance,
           Real scale = 0) {
  for (Real w : want) scale = std::max(scale, std::fabs(w));
  const std::vector<double> values = got.to_vector<double>();
  REQUIRE(values.size() == want.size());
  for (size_t i = 0; i < want.size(); ++i)
    check<T>(what + " [" + std::to_string(i) + "]", values[i], want[i], tolerance, scale);
}

/// The sample as a row, with gaps, and as columns of wider rows; the last dimension or the first.
struct Arranged {
  std::string name;
  Tensor x;
  int64_t dim;
};
template <class T>
std::vector<Arranged> arrangements(const Reals& v) {
  const Tensor row = tensor_of<T>(v);
  const int64_t n = row.numel();
  return {{"a row", row.reshape({1, n}).contiguous(), 1},
          {"a row with gaps", row.reshape({n, 1}).expand({n, 3}).contiguous().t(), 1},
          {"columns", row.reshape({n, 1}).expand({n, 37}).contiguous(), 0},
          {"wide columns", row.reshape({n, 1}).expand({n, 600}).contiguous(), 0}};
}

/// The gradient of sum(f(x) * dy), plain and recorded.
template <class F>
void check_gradient(const std::string& what, const Tensor& x, const Tensor& dy, const F& f,
                    const std::function<void(const std::string&, const Tensor&)>& judge) {
  for (bool recorded : {false, true}) {
    const Tensor leaf = x.detach().requires_grad_();
    const Tensor g =
        autograd::grad({f(leaf)}, {leaf}, {dy}, {.create_graph = recorded})[0].detach();
    judge(what + (recorded ? ", recorded" : ""), g);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("mean, sum and var at any magnitude", T, float, double) {
  const Real eps = std::numeric_limits<T>::epsilon();
  for (size_t n : {2u, 5u, 700u, 40000u})
    for (const Sample& s : samples<T>(n)) {
      if (n == 40000 && s.name.starts_with("of size")) continue;
      const Real count = static_cast<Real>(n), largest = largest_of(s.v);
      for (const Arranged& a : arrangements<T>(s.v)) {
        if (n == 40000 && a.name == "wide columns") continue;
        const std::string what = str_cat(a.name, " of ", n, ", ", s.name);
        const Tensor m = mean(a.x, {a.dim}).flatten(), total = sum(a.x, {a.dim}).flatten();
        check<T>("mean: " + what, m[-1].item<double>(), mean_of(s.v), 4 * eps, largest);
        check<T>("sum: " + what, total[0].item<double>(), mean_of(s.v) * count, 4 * eps,
                 largest * count);
        for (double correction : {0.0, 1.0}) {
          const Tensor v = var(a.x, {a.dim}, correction).flatten();
          check<T>("var: " + what, v[-1].item<double>(), squares_of(s.v) / (count - correction),
                   16 * eps + s.tolerance);
        }
      }
    }
}

TEST_CASE_TEMPLATE("var's gradient at any magnitude, and where the correction exceeds n", T, float,
                   double) {
  const Real eps = std::numeric_limits<T>::epsilon();
  for (const Sample& s : samples<T>(6)) {
    Reals want = centred(s.v);
    for (Real& d : want) d *= 2 / Real(5) * 0.5L;
    check_gradient(
        s.name, tensor_of<T>(s.v), tensor<T>({0.5}).squeeze(0), [](const Tensor& x) { return var(x, {}, 1); },
        [&](const std::string& what, const Tensor& g) { check<T>(what, g, want, 16 * eps + s.tolerance); });
  }
  // PyTorch divides by max(0, n - correction): infinite, with the sign of the deviation.
  check_gradient(
      "correction", tensor<T>({1, 4}), ones({}, {.dtype = dtype_of<T>()}),
      [](const Tensor& x) { return var(x, {}, 3); },
      [&](const std::string&, const Tensor& g) {
        CHECK(g.to_vector<double>() == std::vector<double>{-INFINITY, INFINITY});
      });
}

TEST_CASE("means whose sum is beyond the largest number, to the last bit") {
  CHECK(mean(full({4}, 3e38)).item<float>() == 3e38f);
  CHECK(mean(full({4, 100}, 3e38), {0})[0].item<float>() == 3e38f);
  CHECK(mean(full({1000, 3}, 3e38).t(), {1})[0].item<float>() == 3e38f);
  CHECK(sum(tensor<float>({3e38f, 3e38f, -3e38f, -3e38f, 1e38f})).item<double>() ==
        doctest::Approx(1e38));
  CHECK(sum(tensor<double>({1e308, 1e308, -1e308, -1e308, 1e307})).item<double>() ==
        doctest::Approx(1e307));
  CHECK(var(tensor<float>({1e6f, 1e6f + 0.0625f})).item<float>() == 0.001953125f);
}

namespace {

struct Normalised {
  Reals y, dx;
  Real scale = 0;  // of the terms of dx, which may cancel
};
/// Of one group of values, with its gradient for dy.
Normalised normalise(const Reals& x, const Reals& dy, Real eps) {
  const Real n = static_cast<Real>(x.size());
  const Real rstd = 1 / std::sqrt(squares_of(x) / n + eps);
  const Reals d = centred(x);
  Normalised r;
  r.scale = rstd * largest_of(dy);
  Real c1 = 0, c2 = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    r.y.push_back(d[i] * rstd);
    c1 += dy[i] / n;
    c2 += dy[i] * r.y[i] / n;
  }
  for (size_t i = 0; i < x.size(); ++i) r.dx.push_back(rstd * (dy[i] - c1 - r.y[i] * c2));
  return r;
}
Reals upstream(size_t n) {
  std::mt19937 random(3);
  Reals dy;
  for (size_t i = 0; i < n; ++i) dy.push_back(static_cast<float>(random() * 0x1p-32 - 0.5));
  return dy;
}

}  // namespace

TEST_CASE_TEMPLATE("layer_norm and batch_norm at any magnitude", T, float, double) {
  const Real bound = 64 * static_cast<Real>(std::numeric_limits<T>::epsilon());
  for (size_t n : {2u, 5u, 300u})
    for (double eps : {0.0, 1e-5})
      for (const Sample& s : samples<T>(n)) {
        const Reals dy = upstream(n);
        const Real tolerance = bound + s.tolerance;
        const Normalised want = normalise(s.v, dy, eps);
        const auto rows = static_cast<int64_t>(n);
        const Tensor x = tensor_of<T>(s.v), g = tensor_of<T>(dy);
        struct Norm {
          std::string name;
          Shape shape;
          std::function<Tensor(const Tensor&)> f;
        };
        const auto layer = [&](const Tensor& t) { return layer_norm(t, {rows}, {}, {}, eps); };
        const auto batch = [&](const Tensor& t) {
          return batch_norm(t, {}, {}, {}, {}, true, 0.1, eps);
        };
        for (const Norm& norm : {Norm{"layer_norm", {1, rows}, layer},
                                 Norm{"batch_norm of rows", {rows, 1}, batch},
                                 Norm{"batch_norm of planes", {1, 1, 1, rows}, batch}}) {
          const std::string what = str_cat(norm.name, ", eps ", eps, ", ", n, " ", s.name);
          check<T>(what, norm.f(x.reshape(norm.shape)).flatten(), want.y, tolerance);
          check_gradient(what + ": gradient", x.reshape(norm.shape), g.reshape(norm.shape), norm.f,
                         [&](const std::string& where, const Tensor& dx) {
                           check<T>(where, dx.flatten(), want.dx, 4 * tolerance, want.scale);
                         });
        }
      }
}

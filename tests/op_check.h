// What the tests of ops share: tensors in every layout, a comparison with reference values, and
// derivatives, first and second, against finite differences.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/tensor.h>

namespace op_check {

using namespace lockstep;

inline std::vector<double> random_values(int64_t n, unsigned seed = 1, double low = -2,
                                         double high = 2) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> draw(low, high);
  std::vector<double> values(static_cast<size_t>(n));
  for (double& v : values) v = draw(engine);
  return values;
}
inline Tensor random_tensor(const Shape& shape, DType dtype = DType::f64, unsigned seed = 1,
                            double low = -2, double high = 2) {
  return tensor(random_values(shape.numel(), seed, low, high), shape, {.dtype = dtype});
}

struct Layout {
  std::string name;
  Tensor x;
};

/// The same shape stored in different ways, made of what `make` gives for contiguous shapes; every
/// element is one of its own (but for expanded ones).
inline std::vector<Layout> layouts(const Shape& shape,
                                   const std::function<Tensor(const Shape&)>& make) {
  std::vector<Layout> all{{"contiguous", make(shape)}};
  if (shape.dims() == 0) return all;
  const int last = shape.dims() - 1;
  Shape swapped = shape, wider = shape, offset = shape, single = shape;
  std::swap(swapped[0], swapped[last]);
  wider[last] = 2 * shape[last] + 1;
  offset[0] = shape[0] + 3;
  single[0] = 1;
  all.push_back({"transposed", make(swapped).transpose(0, last)});
  all.push_back({"every second", make(wider).slice(last, {.start = 1, .step = 2})});
  all.push_back({"rows of a larger tensor", make(offset).narrow(0, 2, shape[0])});
  all.push_back({"expanded", make(single).expand(shape)});
  if (shape.dims() == 4)
    all.push_back(
        {"channels-last", make({shape[0], shape[2], shape[3], shape[1]}).permute({0, 3, 1, 2})});
  return all;
}
inline std::vector<Layout> layouts(const Shape& shape, DType dtype, unsigned seed = 1,
                                   double low = -2, double high = 2) {
  return layouts(shape,
                 [&](const Shape& s) { return random_tensor(s, dtype, seed, low, high); });
}

inline bool close(double got, double want, double tolerance) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::fabs(got - want) <= tolerance * (1 + std::fabs(want));
}

/// Compares elements in row-major order; the tolerance is relative to 1 + |want|.
inline void check_close(const std::string& what, const Tensor& got, const std::vector<double>& want,
                        double tolerance) {
  INFO(what);
  REQUIRE(got.numel() == static_cast<int64_t>(want.size()));
  const std::vector<double> values = got.to_vector<double>();
  for (size_t i = 0; i < want.size(); ++i) {
    if (close(values[i], want[i], tolerance)) continue;
    FAIL_CHECK(what << ": element " << i << " is " << values[i] << ", expected " << want[i]);
    return;
  }
}
inline double tolerance_of(DType dtype) { return dtype == DType::f32 ? 2e-6 : 1e-12; }

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

/// sum(w * f(x)), a number to differentiate.
inline double weighted(const Function& f, const std::vector<Tensor>& x, const Tensor& w) {
  NoGradGuard guard;
  const std::vector<double> y = f(x).to_vector<double>(), weights = w.to_vector<double>();
  double total = 0;
  for (size_t i = 0; i < y.size(); ++i) total += y[i] * weights[i];
  return total;
}

/// Central differences of g by every element of every tensor of x (f64, contiguous).
inline std::vector<std::vector<double>> differences(const std::function<double()>& g,
                                                    const std::vector<Tensor>& x, double step) {
  std::vector<std::vector<double>> all;
  for (const Tensor& t : x) {
    std::vector<double> slopes;
    for (int64_t i = 0; i < t.numel(); ++i) {
      double& element = t.data<double>()[i];
      const double before = element;
      element = before + step;
      const double up = g();
      element = before - step;
      const double down = g();
      element = before;
      slopes.push_back((up - down) / (2 * step));
    }
    all.push_back(slopes);
  }
  return all;
}

/// Gradients by x of sum(w * f(x)), zeros where f does not depend on one.
inline std::vector<Tensor> gradients(const Function& f, const std::vector<Tensor>& x,
                                     const Tensor& w, bool create_graph) {
  const Tensor y = f(x);
  auto g = autograd::grad({y}, x, {w}, {.create_graph = create_graph, .allow_unused = true});
  for (size_t i = 0; i < x.size(); ++i)
    if (!g[i].defined()) g[i] = zeros_like(x[i].detach());
  return g;
}

/// Derivatives of f by its inputs (f64, contiguous, made to require grad): the fused backward and
/// the one made of ops against differences of f; second derivatives (by the inputs and by dy)
/// against differences of the fused backward.
inline void check_gradients(const std::string& what, const Function& f, std::vector<Tensor> x,
                            bool second = true, double tolerance = 1e-6) {
  INFO(what);
  for (Tensor& t : x) t.requires_grad_();
  const Tensor y = f(x);
  Tensor w = random_tensor(y.shape(), DType::f64, 77);
  const auto want = differences([&] { return weighted(f, x, w); }, x, 1e-5);
  const auto fused = gradients(f, x, w, false), by_ops = gradients(f, x, w, true);
  for (size_t k = 0; k < x.size(); ++k) {
    check_close(what + ": gradient of input " + std::to_string(k), fused[k], want[k], tolerance);
    check_close(what + ": gradient by ops of input " + std::to_string(k), by_ops[k], want[k],
                tolerance);
  }
  if (!second) return;
  w.requires_grad_();
  std::vector<Tensor> all = x, v;
  all.push_back(w);
  for (size_t k = 0; k < x.size(); ++k)
    v.push_back(random_tensor(x[k].shape(), DType::f64, 100 + static_cast<unsigned>(k)));
  const auto directional = [&] {
    const auto g = gradients(f, x, w.detach(), false);
    double total = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      const auto a = g[k].to_vector<double>(), b = v[k].to_vector<double>();
      for (size_t i = 0; i < a.size(); ++i) total += a[i] * b[i];
    }
    return total;
  };
  const auto want_second = differences(directional, all, 1e-5);
  const auto g = gradients(f, x, w, true);
  std::vector<Tensor> outputs, starts;
  for (size_t k = 0; k < x.size(); ++k)
    if (g[k].requires_grad()) {
      outputs.push_back(g[k]);
      starts.push_back(v[k]);
    }
  REQUIRE(!outputs.empty());
  const auto got = autograd::grad(outputs, all, starts, {.allow_unused = true});
  for (size_t k = 0; k < all.size(); ++k)
    check_close(what + ": second derivative by " +
                    (k < x.size() ? "input " + std::to_string(k) : std::string("dy")),
                got[k].defined() ? got[k] : zeros_like(all[k].detach()), want_second[k],
                10 * tolerance);
}

}  // namespace op_check

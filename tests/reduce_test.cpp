// Reductions against sums written out in double: every layout and dtype, derivatives, special
// values, errors.
#include "op_check.h"

#include <limits>

#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;
using namespace op_check;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// Elements by result: [results][elements in row-major order], for x reduced over the dimensions in
/// `gone`.
std::vector<std::vector<double>> groups(const Tensor& x, unsigned gone) {
  Shape kept = x.shape();
  for (int d = 0; d < x.dim(); ++d)
    if (gone & 1u << d) kept[d] = 1;
  const Strides to = contiguous_strides(kept), from = contiguous_strides(x.shape());
  std::vector<std::vector<double>> all(static_cast<size_t>(kept.numel()));
  const auto values = x.to_vector<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    int64_t at = 0;
    for (int d = 0; d < x.dim(); ++d)
      if (!(gone & 1u << d)) at += i / from[d] % x.shape()[d] * to[d];
    all[static_cast<size_t>(at)].push_back(values[static_cast<size_t>(i)]);
  }
  return all;
}

template <class F>
std::vector<double> each(const std::vector<std::vector<double>>& groups, F f) {
  std::vector<double> results;
  for (const auto& g : groups) results.push_back(f(g));
  return results;
}
double sum_of(const std::vector<double>& v) {
  long double total = 0;
  for (double x : v) total += x;
  return static_cast<double>(total);
}
double mean_of(const std::vector<double>& v) { return sum_of(v) / static_cast<double>(v.size()); }
double squares_of(const std::vector<double>& v) {
  const double m = mean_of(v);
  long double total = 0;
  for (double x : v) total += static_cast<long double>(x - m) * (x - m);
  return static_cast<double>(total);
}
double argmax_of(const std::vector<double>& v) {
  for (size_t i = 0; i < v.size(); ++i)
    if (std::isnan(v[i])) return static_cast<double>(i);
  return static_cast<double>(std::max_element(v.begin(), v.end()) - v.begin());
}

/// The dimensions of a bit set.
Shape dims_of(unsigned gone, int dims) {
  Shape s;
  for (int d = 0; d < dims; ++d)
    if (gone & 1u << d) s.push_back(d % 2 ? d - dims : d);  // some counted from the end
  return s;
}

const std::vector<Shape> kShapes{{},       {1},       {7},          {5, 3},     {70, 90},
                                 {130, 2}, {3, 4, 5}, {2, 6, 3, 5}, {1100, 33}, {40000},
                                 {0},      {3, 0},    {0, 3}};

}  // namespace

TEST_CASE("sum, mean and var over any dimensions agree with sums written out") {
  for (const Shape& shape : kShapes)
    for (DType dtype : {DType::f32, DType::f64})
      for (const auto& [name, x] : layouts(shape, dtype))
        for (unsigned gone = 1; gone < 1u << shape.dims(); ++gone) {
          const Shape dims = dims_of(gone, shape.dims());
          const std::string what = str_cat(shape, " ", dtype, " ", name, " over ", dims);
          const auto g = groups(x, gone);
          Shape kept = shape, without;
          for (int d = 0; d < shape.dims(); ++d)
            if (gone & 1u << d)
              kept[d] = 1;
            else
              without.push_back(shape[d]);
          const Tensor y = sum(x, dims), m = mean(x, dims, true), v = var(x, dims, 0, true);
          CHECK(y.shape() == without);
          CHECK(m.shape() == kept);
          CHECK(y.dtype() == dtype);
          const double tolerance = tolerance_of(dtype);
          check_close("sum " + what, y, each(g, sum_of), tolerance * 10);
          check_close("mean " + what, m, each(g, mean_of), tolerance);
          check_close("var " + what, v,
                      each(g, [](auto& e) { return squares_of(e) / double(e.size()); }), tolerance);
          check_close(
              "unbiased var " + what, var(x, dims),
              each(g, [](auto& e) { return squares_of(e) / std::max(0.0, double(e.size()) - 1); }),
              tolerance);
          check_close("sum_to " + what, sum_to(x, kept), each(g, sum_of), tolerance * 10);
        }
}

TEST_CASE("reductions of everything") {
  for (const Shape& shape : kShapes)
    for (const auto& [name, x] : layouts(shape, DType::f64)) {
      const auto values = x.to_vector<double>();
      CHECK(x.sum().shape() == Shape{});
      check_close("sum", x.sum(), {sum_of(values)}, 1e-12);
      check_close("mean", x.mean(), {mean_of(values)}, 1e-12);
      check_close("var", var(x), {squares_of(values) / std::max(0.0, double(values.size()) - 1)},
                  1e-12);
      if (x.numel())
        check_close("max", x.max(), {*std::max_element(values.begin(), values.end())}, 0);
    }
}

TEST_CASE("integers and bool are summed in i64 and have no mean") {
  for (DType dtype : {DType::i64, DType::i32, DType::i16, DType::i8, DType::u8, DType::boolean})
    for (const Shape& shape : kShapes)
      for (const auto& [name, x] : layouts(shape, dtype, 3, 0, 100)) {
        const std::string what = str_cat(shape, " ", dtype, " ", name);
        CHECK(x.sum().dtype() == DType::i64);
        check_close(what, x.sum(), {sum_of(x.to_vector<double>())}, 0);
        if (shape.dims() > 1) check_close(what, x.sum({0}), each(groups(x, 1), sum_of), 0);
      }
  CHECK_THROWS_AS(arange(0, 4).mean(), DTypeError);
  CHECK_THROWS_WITH_AS(arange(0, 4).mean(), doctest::Contains("i64"), DTypeError);
  CHECK_THROWS_AS(var(arange(0, 4)), DTypeError);
}

TEST_CASE("max and argmax: values, first places, layouts") {
  for (const Shape& shape : kShapes) {
    if (shape.numel() == 0) continue;
    for (DType dtype : {DType::f32, DType::f64, DType::i64, DType::i32, DType::i16, DType::i8, DType::u8, DType::boolean})
      for (const auto& [name, x] : layouts(shape, dtype, 5, 0, 9))
        for (int d = 0; d < std::max(1, shape.dims()); ++d) {
          const std::string what = str_cat(shape, " ", dtype, " ", name, " along ", d);
          const auto g = groups(x, 1u << d);
          const Tensor at = argmax(x, d);
          CHECK(at.dtype() == DType::i64);
          check_close("argmax " + what, at, each(g, argmax_of), 0);
          const auto [values, indices] = max(x, d, true);
          CHECK(values.dtype() == dtype);
          CHECK(values.dim() == shape.dims());
          check_close("max " + what, values,
                      each(g, [](auto& e) { return *std::max_element(e.begin(), e.end()); }), 0);
          check_close("indices " + what, indices, each(g, argmax_of), 0);
        }
  }
}

TEST_CASE("of equals the first wins, and NaN is the largest") {
  for (int64_t n : {3, 200})
    for (DType dtype : {DType::f32, DType::f64}) {
      Tensor x = zeros({n}, {.dtype = dtype});
      CHECK(argmax(x, 0).item<int64_t>() == 0);
      x.narrow(0, 1, 2).fill_(5);
      CHECK(argmax(x, 0).item<int64_t>() == 1);
      x.narrow(0, 2, 1).fill_(kNan);
      CHECK(argmax(x, 0).item<int64_t>() == 2);
      CHECK(std::isnan(x.max().item<double>()));
      CHECK(std::isnan(max(x, 0).values.item<double>()));
      x.narrow(0, 0, 1).fill_(kNan);
      CHECK(argmax(x, 0).item<int64_t>() == 0);
      CHECK(argmax(full({n}, -kInf, {.dtype = dtype}), 0).item<int64_t>() == 0);
    }
}

TEST_CASE("special values go through sums") {
  for (DType dtype : {DType::f32, DType::f64})
    for (Shape shape : {Shape{100}, Shape{100, 40}}) {
      Tensor x = ones(shape, {.dtype = dtype});
      x[70].fill_(kNan);
      CHECK(std::isnan(x.sum().item<double>()));
      CHECK(std::isnan(x.mean().item<double>()));
      CHECK(std::isnan(var(x).item<double>()));
      if (shape.dims() == 2) check_close("rows", x.sum({0}), std::vector<double>(40, kNan), 0);
      x[70].fill_(kInf);
      CHECK(x.sum().item<double>() == kInf);
      x[3].fill_(-kInf);
      CHECK(std::isnan(x.sum().item<double>()));
    }
  CHECK(zeros({0}).sum().item<double>() == 0);
  CHECK(std::isnan(zeros({0}).mean().item<double>()));
  CHECK(zeros({3, 0}).sum({1}).to_vector<double>() == std::vector<double>{0, 0, 0});
}

TEST_CASE("sums in f32 are accurate") {
  const int64_t n = 10'000'000;
  const Tensor x = full({n}, 0.1f);
  const double exact = static_cast<double>(0.1f) * static_cast<double>(n);
  CHECK(std::fabs(x.sum().item<double>() / exact - 1) < 2e-7);
  check_close("rows", x.view({n / 10, 10}).sum({0}), std::vector<double>(10, exact / 10), 2e-7);
  CHECK(var(x).item<double>() < 1e-14);
  // A large mean does not drown the variance.
  const Tensor shifted = random_tensor({100'000}, DType::f32) + 1000;
  check_close("var", var(shifted), {squares_of(shifted.to_vector<double>()) / 99'999}, 1e-6);
}

TEST_CASE("results do not depend on the number of threads") {
  const int before = get_num_threads();
  for (Shape shape : {Shape{1 << 20}, Shape{5000, 77}, Shape{300, 3, 700}, Shape{100'000, 3}}) {
    const Tensor x = random_tensor(shape, DType::f32, 9);
    std::vector<std::vector<float>> results;
    for (int threads : {1, 2, 5}) {
      set_num_threads(threads);
      std::vector<float> r = x.sum().to_vector<float>();
      for (int d = 0; d < shape.dims(); ++d)
        for (const Tensor& y : {x.sum({d}), var(x, {d})})
          for (float v : y.to_vector<float>()) r.push_back(v);
      results.push_back(r);
    }
    CHECK(results[0] == results[1]);
    CHECK(results[0] == results[2]);
  }
  set_num_threads(before);
}

TEST_CASE("derivatives") {
  check_gradients(
      "sum", [](auto& x) { return sum(x[0]); }, {random_tensor({3, 4})}, false);
  check_gradients("sum of squares over a dimension", [](auto& x) { return sum(square(x[0]), {1}); },
                  {random_tensor({3, 4})});
  check_gradients("mean",
                  [](auto& x) {
                    return square(mean(square(x[0]), {0, 2}, true));
                  },
                  {random_tensor({3, 4, 2})});
  check_gradients("mean of all", [](auto& x) { return square(mean(x[0])); },
                  {random_tensor({3, 4})});
  check_gradients("sum_to",
                  [](auto& x) {
                    return square(sum_to(x[0], {4, 1}));
                  },
                  {random_tensor({2, 4, 3})});
  check_gradients("var", [](auto& x) { return var(x[0], {1}); }, {random_tensor({3, 4})});
  check_gradients("var of all", [](auto& x) { return square(var(x[0], {}, 0)); },
                  {random_tensor({3, 4})});
  check_gradients("max", [](auto& x) { return square(max(x[0])); }, {random_tensor({3, 4})});
  check_gradients("max over a dimension", [](auto& x) { return square(max(x[0], 0).values); },
                  {random_tensor({3, 4})});
  check_gradients("max of a transposed",
                  [](auto& x) { return square(max(x[0].t(), -1, true).values); },
                  {random_tensor({3, 4})});
}

TEST_CASE("equal maxima share the gradient of max, the first takes all of that over a dimension") {
  Tensor x = tensor<double>({1, 5, 5, 2}, {4}).requires_grad_();
  x.max().backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{0, 0.5, 0.5, 0});
  x.set_grad({});
  max(x, 0).values.backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{0, 1, 0, 0});
}

TEST_CASE("errors name the op, the rule and the values") {
  const Tensor x = zeros({2, 3});
  CHECK_THROWS_WITH_AS(sum(x, {2}), doctest::Contains("sum: dimension 2"), IndexError);
  CHECK_THROWS_WITH_AS(sum(x, {1, -1}), doctest::Contains("named twice"), ValueError);
  CHECK_THROWS_WITH_AS(sum_to(x, {2}), doctest::Contains("[2] does not broadcast to [2, 3]"),
                       ShapeError);
  CHECK_THROWS_AS(sum_to(x, {1, 2, 3}), ShapeError);
  CHECK_THROWS_WITH_AS(zeros({0}).max(), doctest::Contains("no largest"), ShapeError);
  CHECK_THROWS_AS(argmax(zeros({2, 0}), 1), ShapeError);
  CHECK_THROWS_AS(argmax(x, 2), IndexError);
  CHECK(argmax(zeros({2, 0}), 0).shape() == Shape{0});
}

TEST_CASE("mean and var of equal magnitudes are exact: totals are divided, not scaled") {
  for (int64_t n = 1; n <= 300; ++n) {
    CAPTURE(n);
    CHECK(mean(ones({n}, {.dtype = DType::f64})).item<double>() == 1);
    CHECK(mean(ones({n})).item<float>() == 1);
    const Tensor x = full({2 * n}, 1, {.dtype = DType::f64});
    x.slice(0, {.start = 0, .stop = n}).fill_(-1);
    CHECK(var(x, {0}, 0).item<double>() == 1);
  }
}

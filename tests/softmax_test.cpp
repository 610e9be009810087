// softmax and log_softmax against the definition in double: layouts, dimensions, derivatives,
// special values.
#include "op_check.h"

#include <limits>

#include <lockstep/tensor/ops/softmax.h>

using namespace lockstep;
using namespace op_check;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// softmax or its logarithm along `dim`, in row-major order.
std::vector<double> reference(const Tensor& x, int dim, bool logarithm) {
  const auto values = x.to_vector<double>();
  std::vector<double> y(values.size());
  const int64_t n = x.dim() ? x.shape()[dim] : 1,
                stride = x.dim() ? contiguous_strides(x.shape())[dim] : 1;
  for (int64_t first = 0; first < x.numel(); ++first) {
    if (first / stride % n != 0) continue;  // not the first of its slice
    const auto at = [&](int64_t k) { return static_cast<size_t>(first + k * stride); };
    double largest = -kInf, total = 0;
    for (int64_t k = 0; k < n; ++k) largest = std::max(largest, values[at(k)]);
    for (int64_t k = 0; k < n; ++k) total += std::exp(values[at(k)] - largest);
    for (int64_t k = 0; k < n; ++k) {
      const double log_y = values[at(k)] - largest - std::log(total);
      y[at(k)] = logarithm ? log_y : std::exp(log_y);
    }
  }
  return y;
}

}  // namespace

TEST_CASE("softmax and log_softmax agree with their definition in every layout") {
  for (const Shape& shape :
       {Shape{}, Shape{1}, Shape{9}, Shape{3, 10}, Shape{4, 1}, Shape{2, 1000}, Shape{3, 5, 17},
        Shape{2, 6, 3, 5}, Shape{700, 40}, Shape{0, 3}, Shape{3, 0}})
    for (DType dtype : {DType::f32, DType::f64})
      for (const auto& [name, x] : layouts(shape, dtype, 1, -20, 20))
        for (int d = 0; d < std::max(1, shape.dims()); ++d) {
          const std::string what = str_cat(shape, " ", dtype, " ", name, " along ", d);
          const Tensor y = softmax(x, d), log_y = log_softmax(x, d - shape.dims());
          CHECK(y.dtype() == dtype);
          CHECK(y.shape() == shape);
          const double tolerance = dtype == DType::f32 ? 2e-6 : 1e-14;
          check_close("softmax " + what, y, reference(x, d, false), tolerance);
          check_close("log_softmax " + what, log_y, reference(x, d, true), tolerance);
        }
}

TEST_CASE("large values do not overflow") {
  for (DType dtype : {DType::f32, DType::f64}) {
    const Tensor x = tensor<double>({1e4, 1e4 - 1, -1e4}, {3}, {.dtype = dtype});
    check_close("softmax", softmax(x, 0), {1 / (1 + std::exp(-1)), 1 / (1 + std::exp(1)), 0}, 1e-6);
    check_close("log_softmax", log_softmax(x, 0), reference(x, 0, true), 1e-6);
  }
}

TEST_CASE("special values") {
  for (DType dtype : {DType::f32, DType::f64})
    for (int64_t n : {3, 40}) {
      Tensor x = zeros({2, n}, {.dtype = dtype});
      x[0].narrow(0, 1, 1).fill_(kNan);
      x[1].narrow(0, 2, 1).fill_(-kInf);
      for (const Tensor& y : {softmax(x, 1), log_softmax(x, 1)})
        check_close("NaN in, NaN out", y[0], std::vector<double>(static_cast<size_t>(n), kNan), 0);
      std::vector<double> even(static_cast<size_t>(n), 1 / double(n - 1));
      even[2] = 0;
      check_close("-inf has no part", softmax(x, 1)[1], even, 1e-6);
      CHECK(log_softmax(x, 1)[1][2].item<double>() == -kInf);
      const Tensor none = full({n}, -kInf, {.dtype = dtype});
      CHECK(std::isnan(softmax(none, 0)[0].item<double>()));
      const Tensor infinite = full({n}, kInf, {.dtype = dtype});
      CHECK(std::isnan(log_softmax(infinite, 0)[0].item<double>()));
    }
}

TEST_CASE("derivatives") {
  for (int d : {0, 1, -1}) {
    const std::string along = " along " + std::to_string(d);
    check_gradients("softmax" + along, [&](auto& x) { return softmax(x[0], d); },
                    {random_tensor({3, 4, 5})});
    check_gradients("log_softmax" + along, [&](auto& x) { return log_softmax(x[0], d); },
                    {random_tensor({3, 4, 5})});
  }
  check_gradients("softmax of a transposed", [](auto& x) { return softmax(x[0].t(), 1); },
                  {random_tensor({3, 4})});
  check_gradients("of its square", [](auto& x) { return square(log_softmax(square(x[0]), 1)); },
                  {random_tensor({2, 3})});
}

TEST_CASE("gradients in f32, and of gradients with gaps") {
  Tensor x = random_tensor({6, 33}, DType::f32).requires_grad_();
  const Tensor weights = random_tensor({33, 6}, DType::f32, 5).t();
  for (auto f : {softmax, log_softmax}) {
    const Tensor got = autograd::grad({f(x, 1)}, {x}, {weights})[0];
    Tensor exact = x.detach().to(DType::f64).requires_grad_();
    const Tensor want = autograd::grad({f(exact, 1)}, {exact}, {weights.to(DType::f64)})[0];
    check_close("f32", got, want.to_vector<double>(), 2e-6);
  }
}

TEST_CASE("errors") {
  CHECK_THROWS_WITH_AS(softmax(zeros({2, 3}), 2), doctest::Contains("softmax: dimension 2"),
                       IndexError);
  CHECK_THROWS_WITH_AS(log_softmax(zeros({2}), -2), doctest::Contains("log_softmax"), IndexError);
  CHECK_THROWS_WITH_AS(softmax(arange(0, 3), 0), doctest::Contains("i64"), DTypeError);
}

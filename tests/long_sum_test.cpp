// Sums over millions of terms in f32 against what mathematics gives: products, their gradients,
// convolutions over many images, strided sums, and whole numbers.
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>

using namespace lockstep;

namespace {

constexpr double kTenth = 0.1f;

/// All elements are near `want`. Equal terms round alike, so that their errors add up.
void check_all(const std::string& what, const Tensor& t, double want, double tolerance = 2e-5) {
  CAPTURE(what);
  const double most = max(t).item<double>(), least = -max(t * -1.0).item<double>();
  CHECK(std::fabs(most / want - 1) < tolerance);
  CHECK(std::fabs(least / want - 1) < tolerance);
}
Tensor tenths(const Shape& shape) { return full(shape, kTenth); }

}  // namespace

TEST_CASE("products with a long inner dimension") {
  constexpr int64_t n = 20'000'000;
  check_all("row by column", matmul(ones({1, n}), ones({n, 1})), n);
  check_all("dot", matmul(tenths({n}), tenths({n})), n * kTenth * kTenth);
  constexpr int64_t k = 1'000'000;
  const double want = k * kTenth * kTenth;
  const Tensor wide = tenths({3, k}), tall = tenths({k, 2});
  check_all("matrices", matmul(wide, tall), want);
  check_all("transposed", matmul(tenths({k, 3}).t(), tenths({2, k}).t()), want);
  check_all("matrix by vector", matmul(wide, tenths({k})), want);
  check_all("vector by matrix", matmul(tenths({k}), tall), want);
  check_all("batches", matmul(wide.expand({4, 3, k}), tenths({4, k, 1})), want);
  check_all("linear", linear(tenths({2, k}), tenths({3, k}), zeros({3})), want);
  check_all("more columns than a tile", matmul(tenths({1, 40000}), tenths({40000, 500})),
            40000 * kTenth * kTenth);
  check_all("more rows than a tile", matmul(tenths({300, 40000}), tenths({40000, 3})),
            40000 * kTenth * kTenth);
}

TEST_CASE("gradients that are sums over many rows") {
  constexpr int64_t n = 2'000'000;
  const Tensor w = ones({1, 1}).requires_grad_(), b = zeros({1}).requires_grad_();
  for (Activation activation : {Activation::none, Activation::relu}) {
    w.set_grad({});
    b.set_grad({});
    linear(tenths({n, 1}), w, b, activation).sum().backward();
    check_all("weight", w.grad(), n * kTenth);
    check_all("bias", b.grad(), n);
  }
  const Tensor v = ones({3}).requires_grad_();
  (tenths({n, 3}) * v).sum().backward();
  check_all("a broadcast operand", v.grad(), n * kTenth);
  const Tensor a = ones({3, 2}).requires_grad_();  // summed over the batch
  matmul(tenths({n / 10, 1, 3}), a).sum().backward();
  check_all("a shared matrix", a.grad(), n / 10 * kTenth);
}

TEST_CASE("convolutions over many images, pixels and channels") {
  struct Case {
    Shape x;
    Conv2dOptions options = {};
  };
  for (const auto& [shape, options] : std::vector<Case>{{{40000, 1, 5, 5}},
                                                        {{2000, 16, 9, 9}},
                                                        {{2, 1, 1000, 1000}},
                                                        {{1, 1, 3000, 500}, {.stride = {3, 1}}},
                                                        {{1, 2, 1500, 200}, {.dilation = {200, 1}}},
                                                        {{1, 1, 3, 600000}}}) {
    const auto& shown_shape = shape;  // clang 14 captures no structured binding
    CAPTURE(shown_shape);
    const Tensor w = ones({2, shape[1], 3, 3}).requires_grad_(), b = zeros({2}).requires_grad_();
    const Tensor y = conv2d(tenths(shape), w, b, options);
    y.sum().backward();
    const double pixels = static_cast<double>(y.numel() / 2);
    check_all("weight", w.grad(), pixels * kTenth, 1e-4);
    check_all("bias", b.grad(), pixels);
  }
  check_all("a long patch", conv2d(tenths({1, 100000, 3, 3}), tenths({1, 100000, 3, 3})),
            900000 * kTenth * kTenth);
}

TEST_CASE("sums along and across memory, means and losses") {
  constexpr int64_t n = 3'000'000;
  check_all("a row", tenths({n}).sum(), n * kTenth);
  check_all("columns", tenths({n, 3}).sum({0}), n * kTenth);
  check_all("every second", tenths({n, 2}).t()[1].sum(), n * kTenth);
  check_all("the middle", tenths({2, n, 2}).sum({1}), n * kTenth);
  check_all("an expanded element", tenths({1}).expand({n}).sum(), n * kTenth);
  const Tensor target = zeros({n / 10}, {.dtype = DType::i64});
  check_all("cross_entropy",
            cross_entropy(zeros({n / 10, 2}), target, {.reduction = Reduction::sum}),
            n / 10 * std::log(2.0));
}

TEST_CASE("whole numbers are summed exactly, and wrap around where i64 ends") {
  const int64_t big = (int64_t{1} << 53) + 1;
  CHECK(sum(tensor<int64_t>({big, 2, -1})).item<int64_t>() == big + 1);
  CHECK(sum(full({1001, 3}, 1, {.dtype = DType::u8}), {0}).to_vector<int64_t>() ==
        std::vector<int64_t>{1001, 1001, 1001});
  const int64_t most = INT64_MAX;
  CHECK(sum(tensor<int64_t>({most, most, 2})).item<int64_t>() == 0);
  CHECK(max(tensor<int64_t>({big, big - 1})).item<int64_t>() == big);
}

// Sums of so many terms that adding them one after the other in f32 stands still: in reductions, and
// inside products, losses and gradients. Terms are equal, so the sum is known.
#include <doctest/doctest.h>

#include <cmath>

#include <lockstep/tensor/ops.h>

using namespace lockstep;

namespace {

constexpr int64_t kMany = 2000000;

void check_near(const Tensor& got, double want, double tolerance = 1e-6) {
  for (double v : got.to_vector<double>()) {
    CHECK(std::fabs(v - want) <= tolerance * std::fabs(want));
    if (std::fabs(v - want) > tolerance * std::fabs(want)) return;
  }
}
/// A product adds blocks of thousands of terms in f32, all of which may be rounded the same way.
constexpr double kProduct = 2e-5;
const double kTenth = static_cast<double>(0.1f);

}  // namespace

TEST_CASE("sum, mean and var of two million equal terms, along either dimension") {
  for (const Shape& shape : {Shape{kMany}, Shape{kMany / 2, 2}, Shape{2, kMany / 2}}) {
    const Tensor x = full(shape, 0.1);
    check_near(sum(x), kTenth * kMany);
    check_near(mean(x), kTenth);
    check_near(sum(x, {0}), kTenth * static_cast<double>(shape[0]));
    check_near(sum(x, {-1}), kTenth * static_cast<double>(shape.back()));
    CHECK(var(x).item<double>() < 1e-16);
  }
}

TEST_CASE("matmul over inner dimensions of millions") {
  check_near(matmul(ones({20000000}), ones({20000000})), 20000000);
  check_near(matmul(full({1, kMany}, 0.1), ones({kMany, 3})), kTenth * kMany, kProduct);
  check_near(matmul(full({3, kMany}, 0.1), ones({kMany, 1})), kTenth * kMany, kProduct);
  check_near(matmul(full({kMany, 4}, 0.1).t(), ones({kMany, 5})), kTenth * kMany, kProduct);
  check_near(matmul(full({5, kMany / 8}, 0.1), ones({4, kMany / 8}).t()), kTenth * kMany / 8,
             kProduct);
}

TEST_CASE("linear: gradients of weight and bias over two million samples") {
  for (const int64_t outputs : {1, 3}) {
    const Tensor w = ones({outputs, 2}).requires_grad_(), b = ones({outputs}).requires_grad_();
    linear(full({kMany, 2}, 0.1), w, b).sum().backward();
    check_near(w.grad(), kTenth * kMany, kProduct);
    check_near(b.grad(), kMany);
  }
}

TEST_CASE("add: the gradient of a broadcast operand over two million elements") {
  const Tensor row = ones({2}).requires_grad_(), all = ones({}).requires_grad_();
  const Tensor x = full({kMany / 2, 2}, 0.1);
  (x * row + all).sum().backward();
  check_near(row.grad(), kTenth * kMany / 2);
  check_near(all.grad(), kMany);
}

TEST_CASE("cross_entropy and mse_loss: means and sums over half a million samples") {
  constexpr int64_t n = 500000;
  const Tensor logits = zeros({n, 2}), labels = zeros({n}, {.dtype = DType::i64});
  check_near(cross_entropy(logits, labels), std::log(2.0));
  check_near(cross_entropy(logits, labels, {.reduction = Reduction::sum}), n * std::log(2.0));
  check_near(mse_loss(full({2 * n}, 0.1), zeros({2 * n})), kTenth * kTenth);
  check_near(mse_loss(full({2 * n}, 0.1), zeros({2 * n}), Reduction::sum), kTenth * kTenth * 2 * n);
}

TEST_CASE("conv2d: gradients of weight and bias over a million pixels") {
  const Tensor w = ones({2, 1, 1, 1}).requires_grad_(), b = zeros({2}).requires_grad_();
  conv2d(full({4, 1, 500, 500}, 0.1), w, b).sum().backward();
  check_near(w.grad(), kTenth * 1000000, kProduct);
  check_near(b.grad(), 1000000);
}

TEST_CASE("layer_norm and batch_norm: gradients of weight and bias over half a million rows") {
  constexpr int64_t n = 500000;
  const Tensor x = arange(0, 2 * n).view({n, 2}).to(DType::f32);  // each row becomes -1, 1
  const Tensor w = ones({2}).requires_grad_(), b = zeros({2}).requires_grad_();
  layer_norm(x, {2}, w, b, 0).sum().backward();
  CHECK(std::fabs(w.grad()[0].item<double>() + n) < 1);
  CHECK(std::fabs(w.grad()[1].item<double>() - n) < 1);
  check_near(b.grad(), n);
  const Tensor bias = zeros({2}).requires_grad_();
  batch_norm(x, {}, {}, ones({2}), bias, true).sum().backward();
  check_near(bias.grad(), n);
}

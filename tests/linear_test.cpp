// linear is matmul, add and relu in one: it must give what those three give, forward and backward.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/parallel.h>

#include "op_check.h"

using namespace lockstep;
using namespace op_check;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Inputs = const std::vector<Tensor>&;

Tensor by_parts(const Tensor& x, const Tensor& w, const Tensor& b, Activation activation) {
  Tensor y = matmul(x, w.t());
  if (b.defined()) y = y + b;
  return activation == Activation::relu ? relu(y) : y;
}
double tolerance(DType dtype) { return dtype == DType::f32 ? 2e-5 : 1e-12; }

}  // namespace

TEST_CASE("linear equals matmul, add and relu, forward and backward") {
  for (DType dtype : {DType::f32, DType::f64})
    for (const Shape& x_shape :
         {Shape{5, 7}, Shape{1, 7}, Shape{150, 7}, Shape{7}, Shape{2, 3, 7}, Shape{2, 1, 3, 7}})
      for (bool with_bias : {true, false})
        for (Activation activation : {Activation::none, Activation::relu}) {
          INFO(str_cat("x ", x_shape, ", ", dtype, ", bias ", with_bias, ", relu ",
                       activation == Activation::relu));
          Tensor inputs[2][3], y[2];
          for (int way : {0, 1}) {
            inputs[way][0] = random_tensor(x_shape, dtype, 1).requires_grad_();
            inputs[way][1] = random_tensor({6, 7}, dtype, 2).requires_grad_();
            if (with_bias) inputs[way][2] = random_tensor({6}, dtype, 3).requires_grad_();
            const auto& [x, w, b] = inputs[way];
            y[way] = way == 0 ? linear(x, w, b, activation) : by_parts(x, w, b, activation);
            y[way].backward(random_tensor(y[way].shape(), dtype, 4));
          }
          CHECK(y[0].shape() == y[1].shape());
          check_close("y", y[0], y[1].to_vector<double>(), tolerance(dtype));
          for (int i = 0; i < (with_bias ? 3 : 2); ++i)
            check_close(str_cat("gradient of input ", i), inputs[0][i].grad(),
                        inputs[1][i].grad().to_vector<double>(), 10 * tolerance(dtype));
        }
}

TEST_CASE("the result has no row of the batch mixed with another") {
  const Tensor w = tensor(V{1, 0, 0, 2, 1, 1}, {3, 2}), b = tensor(V{10, 20, 30});
  const Tensor x = tensor(V{1, 2, -3, -40}, {2, 2});
  CHECK(linear(x, w, b).to_vector<double>() == V{11, 24, 33, 7, -60, -13});
  CHECK(linear(x, w, b, Activation::relu).to_vector<double>() == V{11, 24, 33, 7, 0, 0});
  CHECK(linear(x, w).to_vector<double>() == V{1, 4, 3, -3, -80, -43});
}

TEST_CASE("input, weight and bias may lie in memory in any way") {
  for (DType dtype : {DType::f32, DType::f64})
    for (const Layout& x : layouts({4, 5}, dtype, 5))
      for (const Layout& w : layouts({3, 5}, dtype, 6))
        for (const Layout& b : layouts({3}, dtype, 7))
          check_close(x.name + ", " + w.name + ", " + b.name, linear(x.x, w.x, b.x),
                      by_parts(x.x, w.x, b.x, Activation::none).to_vector<double>(),
                      tolerance(dtype));
  for (const Layout& x : layouts({2, 3, 5}, DType::f64, 8)) {
    const Tensor w = random_tensor({4, 5}, DType::f64, 9);
    check_close("3-d, " + x.name, linear(x.x, w),
                by_parts(x.x, w, {}, Activation::none).to_vector<double>(), 1e-12);
  }
}

TEST_CASE("first and second derivatives, with and without bias and relu") {
  for (Activation activation : {Activation::none, Activation::relu}) {
    const auto f = [activation](Inputs in) {
      return linear(in[0], in[1], in.size() > 2 ? in[2] : Tensor(), activation);
    };
    for (const Shape& shape : {Shape{3, 2}, Shape{2}, Shape{2, 2, 2}}) {
      INFO(str_cat(shape));
      std::vector<Tensor> in{random_tensor(shape, DType::f64, 10).requires_grad_(),
                             random_tensor({4, 2}, DType::f64, 11).requires_grad_()};
      CHECK_NOTHROW(autograd::gradcheck(f, in));
      in.push_back(random_tensor({4}, DType::f64, 12).requires_grad_());
      CHECK_NOTHROW(autograd::gradcheck(f, in));
      CHECK_NOTHROW(autograd::gradgradcheck(f, in));
      CHECK_NOTHROW(autograd::gradgradcheck([&](Inputs i) { return square(f(i)); },
                                            in));  // dy depends on them too
    }
  }
}

TEST_CASE("only wanted gradients are computed") {
  const Tensor x = random_tensor({3, 2}, DType::f64, 13), w = random_tensor({4, 2}, DType::f64, 14);
  Tensor b = random_tensor({4}, DType::f64, 15).requires_grad_();
  linear(x, w, b, Activation::relu).sum().backward();
  CHECK(b.grad().shape() == Shape{4});
  CHECK_FALSE(x.requires_grad());
  Tensor lone = random_tensor({3, 2}, DType::f64, 13).requires_grad_();
  linear(lone, w).sum().backward();
  check_close("dx", lone.grad(), matmul(ones({3, 4}, {.dtype = DType::f64}), w).to_vector<double>(),
              1e-12);
}

TEST_CASE("NaN and infinity come through relu as through the op, and so do their gradients") {
  for (DType dtype : {DType::f32, DType::f64})
    for (bool with_bias : {false, true}) {
      const Tensor x = tensor(V{NAN, INFINITY, -INFINITY, -1}, {4, 1}, {.dtype = dtype});
      const Tensor y =
          linear(x, ones({1, 1}, {.dtype = dtype}),
                 with_bias ? zeros({1}, {.dtype = dtype}) : Tensor(), Activation::relu);
      const auto v = y.to_vector<double>();
      CHECK(std::isnan(v[0]));
      CHECK(v[1] == INFINITY);
      CHECK(v[2] == 0);
      CHECK(v[3] == 0);
    }
  const auto gradient = [](auto f) {
    const Tensor x = tensor(V{NAN, 2, -1}, {3, 1}).requires_grad_();
    f(x).backward(tensor(V{5, 6, 7}, {3, 1}));
    return x.grad();
  };
  const Tensor w = ones({1, 1}, {.dtype = DType::f64});
  check_close("gradient",
              gradient([&](const Tensor& x) { return linear(x, w, {}, Activation::relu); }),
              gradient([](const Tensor& x) { return relu(x); }).to_vector<double>(), 0);
}

TEST_CASE("a result that relu made may not be changed in place before backward") {
  const Tensor w = random_tensor({4, 2}, DType::f64, 16).requires_grad_(),
               x = random_tensor({3, 2}, DType::f64, 17);
  Tensor y = linear(x, w, {}, Activation::relu);
  y.mul_(2);
  CHECK_THROWS_WITH_AS(y.sum().backward(), Contains("linear"), AutogradError);
  Tensor z = linear(x, w);  // without it nothing reads the result
  z.mul_(2);
  CHECK_NOTHROW(z.sum().backward());
}

TEST_CASE("no rows, and no features") {
  const Tensor w = random_tensor({3, 2}, DType::f32, 18).requires_grad_(),
               b = random_tensor({3}, DType::f32, 19);
  CHECK(linear(zeros({0, 2}), w, b).shape() == Shape{0, 3});
  CHECK(linear(zeros({2, 0, 2}), w, b).shape() == Shape{2, 0, 3});
  linear(zeros({0, 2}), w, b).sum().backward();
  CHECK(w.grad().to_vector<double>() == std::vector<double>(6, 0));
  for (const Shape& shape : {Shape{2, 0}, Shape{2, 1, 0}, Shape{0}}) {
    const Tensor y = linear(zeros(shape), zeros({3, 0}), b);
    CHECK(y.size(-1) == 3);
    check_close("bias alone", y, b.expand(y.shape()).to_vector<double>(), 0);
  }
}

TEST_CASE("the bits of result and gradients do not depend on the number of threads") {
  const int before = get_num_threads();
  for (DType dtype : {DType::f32, DType::f64}) {
    const auto run = [dtype](int threads) {
      set_num_threads(threads);
      const Tensor x = random_tensor({300, 50}, dtype, 20).requires_grad_(),
                   w = random_tensor({130, 50}, dtype, 21).requires_grad_(),
                   b = random_tensor({130}, dtype, 22).requires_grad_();
      const Tensor y = linear(x, w, b, Activation::relu);
      y.backward(random_tensor(y.shape(), dtype, 23));
      return std::vector<Tensor>{y.detach(), x.grad(), w.grad(), b.grad()};
    };
    const auto one = run(1);
    for (int threads : {2, 3}) {
      const auto more = run(threads);
      for (size_t i = 0; i < one.size(); ++i)
        CHECK(std::memcmp(one[i].data_ptr(), more[i].data_ptr(),
                          static_cast<size_t>(one[i].numel()) * size_of(dtype)) == 0);
    }
  }
  set_num_threads(before);
}

TEST_CASE("errors name the rule, the shapes and a remedy") {
  const Tensor w = zeros({4, 6});
  CHECK_THROWS_WITH_AS(linear(zeros({2, 5}), w),
                       Contains("linear: input [2, 5] has 5 features, the weight [4, 6] expects 6"),
                       ShapeError);
  CHECK_THROWS_WITH_AS(linear(zeros({5, 2, 3}), w), Contains("flatten(1)"), ShapeError);
  CHECK_THROWS_AS(linear(scalar(1), w), ShapeError);
  CHECK_THROWS_AS(linear(zeros({2, 5}), zeros({4, 0})), ShapeError);
  CHECK_THROWS_WITH_AS(linear(zeros({2, 6}), zeros({6})), Contains("[out, in]"), ShapeError);
  CHECK_THROWS_WITH_AS(linear(zeros({2, 6}), w, zeros({6})),
                       Contains("the bias must be [4], got [6]"), ShapeError);
  CHECK_THROWS_WITH_AS(linear(zeros({2, 6}, {.dtype = DType::f64}), w), Contains("f64"),
                       DTypeError);
  CHECK_THROWS_WITH_AS(linear(zeros({2, 6}), w, zeros({4}, {.dtype = DType::f64})),
                       Contains("linear: "), DTypeError);
  CHECK_THROWS_AS(
      linear(zeros({2, 6}, {.dtype = DType::i64}), zeros({4, 6}, {.dtype = DType::i64})),
      DTypeError);
}

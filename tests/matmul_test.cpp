// matmul against a double loop over indices, for every way in which an operand can lie in memory.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/device_backend.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/parallel.h>

#include "op_check.h"

using namespace lockstep;
using namespace op_check;
using doctest::Contains;

namespace {

using Inputs = const std::vector<Tensor>&;

/// a [..., M, K] b [..., K, N] by indices, in double; a and b have at least two dimensions.
std::vector<double> product(const Tensor& a, const Tensor& b) {
  Shape batch = Shape::filled(std::max(a.dim(), b.dim()) - 2, 1);
  const auto lead = [&](const Tensor& t, int d) -> int64_t {  // t's size along batch dimension d
    const int own = d - (batch.dims() - (t.dim() - 2));
    return own < 0 ? 1 : t.shape()[own];
  };
  for (int d = 0; d < batch.dims(); ++d) batch[d] = lead(a, d) == 1 ? lead(b, d) : lead(a, d);
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  const auto av = a.to_vector<double>(), bv = b.to_vector<double>();
  std::vector<double> y;
  for (int64_t i = 0; i < batch.numel(); ++i) {
    const auto matrix =
        [&](const Tensor& t) {  // which matrix of t belongs to the i-th of the result
          int64_t index = 0, scale = 1, rest = i;
          for (int d = batch.dims() - 1; d >= 0; --d) {
            index += lead(t, d) == 1 ? 0 : rest % batch[d] * scale;
            scale *= lead(t, d);
            rest /= batch[d];
          }
          return index;
        };
    const int64_t a0 = matrix(a) * m * k, b0 = matrix(b) * k * n;
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c) {
        double sum = 0;
        for (int64_t j = 0; j < k; ++j)
          sum += av[static_cast<size_t>(a0 + r * k + j)] * bv[static_cast<size_t>(b0 + j * n + c)];
        y.push_back(sum);
      }
  }
  return y;
}
double tolerance(DType dtype) { return dtype == DType::f32 ? 2e-5 : 1e-12; }

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() &&
         std::memcmp(a.data_ptr(), b.data_ptr(),
                     static_cast<size_t>(a.numel()) * size_of(a.dtype())) == 0;
}

}  // namespace

TEST_CASE("products of matrices of many sizes agree with a loop, in f32 and f64") {
  for (DType dtype : {DType::f32, DType::f64})
    for (int64_t m : {1, 2, 7, 65, 130})
      for (int64_t k : {1, 3, 64})
        for (int64_t n : {1, 5, 70, 131}) {
          const Tensor a = random_tensor({m, k}, dtype, 1), b = random_tensor({k, n}, dtype, 2);
          const Tensor y = matmul(a, b);
          CHECK(y.shape() == Shape{m, n});
          CHECK(y.dtype() == dtype);
          const std::vector<double> want = product(a, b);
          check_close(str_cat("product of ", a.shape(), " and ", b.shape()), y, want,
                      tolerance(dtype));
          const Tensor at = a.t().contiguous().t(),
                       bt = b.t().contiguous().t();  // the same, stored by columns
          check_close(str_cat("by columns, ", a.shape(), " and ", b.shape()), matmul(at, bt), want,
                      tolerance(dtype));
          check_close(str_cat("rows by columns, ", a.shape(), " and ", b.shape()), matmul(a, bt),
                      want, tolerance(dtype));
        }
}

TEST_CASE("operands may lie in memory in any way") {
  for (DType dtype : {DType::f32, DType::f64})
    for (const Layout& a : layouts({5, 4}, dtype, 3))
      for (const Layout& b : layouts({4, 6}, dtype, 4))
        check_close(a.name + " times " + b.name, matmul(a.x, b.x), product(a.x, b.x),
                    tolerance(dtype));
  const Tensor wide = random_tensor({4, 6, 8}, DType::f64, 5);
  check_close("a matrix across", matmul(wide.select(1, 2), wide.select(0, 1).t()),
              product(wide.select(1, 2), wide.select(0, 1).t()), 1e-12);
  const Tensor column = random_tensor({6, 8}, DType::f64, 6).narrow(1, 3, 1);  // [6, 1], stride 8
  check_close("a strided column", matmul(column.t(), column), product(column.t(), column), 1e-12);
  check_close("an outer product", matmul(column, column.t()), product(column, column.t()), 1e-12);
}

TEST_CASE("a transposed operand, or rows of a wider one, is read where it lies") {
  const Tensor a = random_tensor({256, 256}, DType::f64, 7),
               wide = random_tensor({256, 512}, DType::f64, 8);
  const auto extra = [](const Tensor& p, const Tensor& q) {  // bytes beyond the result's
    const int64_t before = memory_stats().active_bytes;
    reset_peak_memory();
    const Tensor y = matmul(p, q);
    return memory_stats().peak_bytes - before - y.numel() * 8;
  };
  CHECK(extra(a.t(), a) < 1000);
  CHECK(extra(a, a.t()) < 1000);
  CHECK(extra(a.t(), a.t()) < 1000);
  CHECK(extra(wide.narrow(1, 100, 256), a) < 1000);
}

TEST_CASE("leading dimensions are batches, and broadcast") {
  const auto check = [](const Tensor& a, const Tensor& b, const Shape& shape) {
    const Tensor y = matmul(a, b);
    CHECK(y.shape() == shape);
    check_close(str_cat("batched product of ", a.shape(), " and ", b.shape()), y, product(a, b),
                1e-12);
  };
  auto make = [seed = 10u](const Shape& s) mutable { return random_tensor(s, DType::f64, ++seed); };
  check(make({3, 2, 4}), make({3, 4, 5}), {3, 2, 5});
  check(make({3, 2, 4}), make({4, 5}), {3, 2, 5});
  check(make({2, 4}), make({3, 4, 5}), {3, 2, 5});
  check(make({3, 1, 2, 4}), make({2, 4, 5}), {3, 2, 2, 5});
  check(make({2, 1, 2, 4}), make({1, 3, 4, 5}), {2, 3, 2, 5});
  check(make({2, 3, 4, 2}).transpose(-1, -2), make({2, 3, 4, 5}), {2, 3, 2, 5});
  check(make({2, 4, 3, 5}).transpose(1, 2), make({2, 3, 5, 4}),
        {2, 3, 4, 4});  // heads of attention
  check(make({1, 2, 4}).expand({3, 2, 4}), make({3, 4, 5}), {3, 2, 5});
}

TEST_CASE("a 1-d operand is a row or a column whose dimension is dropped") {
  const Tensor v = random_tensor({4}, DType::f64, 20), m = random_tensor({4, 3}, DType::f64, 21),
               batch = random_tensor({2, 5, 4}, DType::f64, 22);
  CHECK(matmul(v, v).dim() == 0);
  check_close("dot", matmul(v, v), product(v.view({1, 4}), v.view({4, 1})), 1e-12);
  CHECK(matmul(v, m).shape() == Shape{3});
  check_close("row", matmul(v, m), product(v.view({1, 4}), m), 1e-12);
  CHECK(matmul(m.t(), v).shape() == Shape{3});
  check_close("column", matmul(m.t(), v), product(m.t(), v.view({4, 1})), 1e-12);
  CHECK(matmul(batch, v).shape() == Shape{2, 5});
  check_close("batch times column", matmul(batch, v), product(batch, v.view({4, 1})), 1e-12);
  CHECK(matmul(v, batch.transpose(1, 2)).shape() == Shape{2, 5});
  CHECK(v.matmul(m).shape() == Shape{3});
}

TEST_CASE("empty operands: no rows give no rows, an empty sum is zero") {
  for (DType dtype : {DType::f32, DType::f64}) {
    const auto z = [dtype](const Shape& s) { return zeros(s, {.dtype = dtype}); };
    CHECK(matmul(z({0, 3}), z({3, 2})).shape() == Shape{0, 2});
    CHECK(matmul(z({2, 3}), z({3, 0})).shape() == Shape{2, 0});
    CHECK(matmul(z({0, 2, 3}), z({3, 4})).shape() == Shape{0, 2, 4});
    const Tensor y = matmul(z({2, 0}), z({0, 3}));
    CHECK(y.to_vector<double>() == std::vector<double>(6, 0));
    CHECK(matmul(z({0}), z({0})).item<double>() == 0);
  }
  const Tensor a = zeros({2, 0}, {.dtype = DType::f64, .requires_grad = true});
  matmul(a, zeros({0, 3}, {.dtype = DType::f64})).sum().backward();
  CHECK(a.grad().shape() == Shape{2, 0});
}

TEST_CASE("NaN and infinity come through, even times zero") {
  const double inf = INFINITY;
  for (DType dtype : {DType::f32, DType::f64}) {
    const Tensor a = tensor(std::vector<double>{inf, 1, 0, NAN}, {2, 2}, {.dtype = dtype});
    const auto y = matmul(a, zeros({2, 2}, {.dtype = dtype})).to_vector<double>();
    for (double v : y) CHECK(std::isnan(v));
    CHECK(matmul(a, ones({2, 1}, {.dtype = dtype})).to_vector<double>()[0] == inf);
  }
}

TEST_CASE("first and second derivatives, broadcast and 1-d operands too") {
  const auto f = [](Inputs in) { return matmul(in[0], in[1]); };
  unsigned seed = 30;
  const std::pair<Shape, Shape> cases[] = {{{2, 3}, {3, 4}},
                                           {{3}, {3}},
                                           {{3}, {3, 2}},
                                           {{2, 3}, {3}},
                                           {{2, 2, 3}, {3, 2}},
                                           {{2, 3}, {2, 3, 2}},
                                           {{2, 1, 1, 3}, {2, 3, 2}},
                                           {{2, 2, 3}, {3}}};
  for (const auto& operands : cases) {
    const Shape &a = operands.first, &b = operands.second;
    INFO(str_cat(a, " x ", b));
    const Tensor x = random_tensor(a, DType::f64, ++seed).requires_grad_(),
                 y = random_tensor(b, DType::f64, ++seed).requires_grad_();
    CHECK_NOTHROW(autograd::gradcheck(f, {x, y}));
    CHECK_NOTHROW(autograd::gradgradcheck(f, {x, y}));
    CHECK_NOTHROW(autograd::gradgradcheck([&](Inputs in) { return square(f(in)); }, {x, y}));
    CHECK_NOTHROW(autograd::gradcheck(f, {x, y.detach()}));
  }
  const auto transposed = [](Inputs in) { return matmul(in[0].t(), in[1].t()); };
  const Tensor x = random_tensor({3, 2}, DType::f64, 50).requires_grad_(),
               y = random_tensor({4, 3}, DType::f64, 51).requires_grad_();
  CHECK_NOTHROW(autograd::gradgradcheck(transposed, {x, y}));
}

TEST_CASE("the bits of a product do not depend on the number of threads") {
  const int before = get_num_threads();
  for (DType dtype : {DType::f32, DType::f64})
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>{300, 40}, {40, 300}, {257, 259}}) {
      const Tensor a = random_tensor({m, 100}, dtype, 60), b = random_tensor({100, n}, dtype, 61);
      set_num_threads(1);
      const Tensor one = matmul(a, b), one_t = matmul(b.t(), a.t());
      for (int threads : {2, 3}) {
        set_num_threads(threads);
        CHECK(same_bits(matmul(a, b), one));
        CHECK(same_bits(matmul(b.t(), a.t()), one_t));
      }
    }
  set_num_threads(before);
}

TEST_CASE("errors name the rule, the shapes and a remedy") {
  const Tensor a = zeros({2, 3}), b = zeros({4, 5});
  CHECK_THROWS_WITH_AS(matmul(a, b), Contains("matmul: inner dimensions differ: [2, 3] x [4, 5]"),
                       ShapeError);
  CHECK_THROWS_WITH_AS(matmul(a, zeros({5, 3})), Contains("did you mean b.transpose"), ShapeError);
  CHECK_THROWS_WITH_AS(matmul(zeros({3}), zeros({4, 5})),
                       Contains("matmul: inner dimensions differ"), ShapeError);
  CHECK_THROWS_WITH_AS(matmul(zeros({2, 2, 3}), zeros({3, 3, 4})), Contains("matmul"), ShapeError);
  CHECK_THROWS_WITH_AS(matmul(scalar(1), a), Contains("at least one dimension"), ShapeError);
  CHECK_THROWS_WITH_AS(matmul(a, zeros({3, 2}, {.dtype = DType::f64})), Contains("f32 and f64"),
                       DTypeError);
  CHECK_THROWS_WITH_AS(matmul(arange(0, 4).view({2, 2}), arange(0, 4).view({2, 2})),
                       Contains("i64"), DTypeError);
}

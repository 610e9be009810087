// What holds for element-wise ops beside their values, which ops_test.cpp checks: promotion, ties,
// where, what may happen in place and what must not, and what is kept for backward.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/formula_traits.h>

using namespace lockstep;

namespace {
Tensor of(std::vector<double> v, DType t = DType::f32) {
  return tensor(v, {static_cast<int64_t>(v.size())}, {.dtype = t});
}
std::vector<double> values(const Tensor& t) { return t.to_vector<double>(); }
using V = std::vector<double>;
}  // namespace

TEST_CASE("promotion of two tensors is PyTorch's") {
  auto result = [](DType a, DType b) {
    return (ones({2}, {.dtype = a}) + ones({2}, {.dtype = b})).dtype();
  };
  CHECK(result(DType::f32, DType::f64) == DType::f64);
  CHECK(result(DType::f32, DType::i64) == DType::f32);
  CHECK(result(DType::i32, DType::i64) == DType::i64);
  CHECK(result(DType::u8, DType::i32) == DType::i32);
  CHECK(result(DType::boolean, DType::u8) == DType::u8);
  CHECK(result(DType::boolean, DType::boolean) == DType::boolean);
  CHECK((ones({2}, {.dtype = DType::i64}) / ones({2}, {.dtype = DType::i64})).dtype() ==
        DType::f32);
  // A 0-d tensor changes the kind only.
  CHECK((ones({2}) + scalar(1, {.dtype = DType::f64})).dtype() == DType::f32);
  CHECK((scalar(1, {.dtype = DType::i64}) + ones({2}, {.dtype = DType::u8})).dtype() == DType::u8);
  CHECK((ones({2}, {.dtype = DType::i64}) + scalar(1.5)).dtype() == DType::f32);
  CHECK((scalar(1) + scalar(1, {.dtype = DType::f64})).dtype() == DType::f64);
}

TEST_CASE("promotion with a number: floats stay, only a fraction turns integers into f32") {
  const Tensor f = of({1, 2}), d = of({1, 2}, DType::f64), i = of({1, 2}, DType::i64),
               u = of({1, 200}, DType::u8), b = of({0, 1}, DType::boolean);
  CHECK((f * 2.5).dtype() == DType::f32);
  CHECK((2 - d).dtype() == DType::f64);
  CHECK((i + 2).dtype() == DType::i64);
  CHECK((i + 2.0).dtype() == DType::f32);
  CHECK((i / 2).dtype() == DType::f32);
  CHECK((b + 1).dtype() == DType::i64);
  CHECK((b * 0.5).dtype() == DType::f32);
  CHECK(values(u + 100) == V{101, 44});  // wraps around
  CHECK(values(gt(u, -1)) == V{1, 1});   // compares numbers, not bytes
  CHECK(values(lt(u, 300)) == V{1, 1});
  CHECK(values(maximum(u, -5)) == V{1, 200});
  CHECK(values(clamp(u, -5, 100)) == V{1, 100});
  const int64_t big = (int64_t{1} << 60) + 1;  // not a double
  CHECK((full({1}, 0, {.dtype = DType::i64}) + big).item<int64_t>() == big);
  CHECK(eq(full({1}, 0, {.dtype = DType::i64}) + big, big - 1).item<bool>() == false);
  CHECK_THROWS_AS(pow(i, -1), ValueError);
  CHECK_THROWS_AS(-b, DTypeError);
  CHECK_THROWS_AS(b - b, DTypeError);
  CHECK_THROWS_AS(relu(b), DTypeError);
}

TEST_CASE("promotion with a number: an integer turns bool into i64, a bool does not") {
  const Tensor b = of({0, 1}, DType::boolean);
  const auto is = [](const Tensor& y, DType t, const V& want) {
    CHECK(y.dtype() == t);
    CHECK(values(y) == want);
  };
  is(where(b, b, 2), DType::i64, {2, 1});
  is(where(b, -5, b), DType::i64, {0, -5});
  is(where(b, b, 1), DType::i64, {1, 1});
  is(where(b, b, 0.5), DType::f32, {0.5, 1});
  is(where(b, b, true), DType::boolean, {1, 1});
  is(where(b, false, b), DType::boolean, {0, 0});
  is(b + 2, DType::i64, {2, 3});
  is(b + true, DType::boolean, {1, 1});
  is(b * false, DType::boolean, {0, 0});
  is(maximum(b, 3), DType::i64, {3, 3});
  is(maximum(b, true), DType::boolean, {1, 1});
  is(clamp(b, 1, 2), DType::i64, {1, 1});
  is(clamp(b, 0.5, 2), DType::f32, {0.5, 1});
  is(eq(b, true), DType::boolean, {0, 1});
  is(eq(b, 2), DType::boolean, {0, 0});
  is(of({3, 4}, DType::u8) + true, DType::u8, {4, 5});
  is(of({3, 4}) * true, DType::f32, {3, 4});
  CHECK_THROWS_AS(b - true, DTypeError);
  Tensor x = of({0, 1}, DType::boolean);
  CHECK_THROWS_WITH_AS(x.add_(1), doctest::Contains("i64"), DTypeError);
  is(x.mul_(true), DType::boolean, {0, 1});
}

TEST_CASE("-0.0 as a number keeps its sign in ops of floats") {
  for (DType t : {DType::f32, DType::f64}) {
    const auto negative = [](const Tensor& y) { return std::signbit(y.item<double>()); };
    const auto x = [t](double v) { return full({}, v, {.dtype = t}); };
    CHECK(negative(x(3).mul_(-0.0)));
    CHECK_FALSE(negative(x(3).mul_(0.0)));
    CHECK_FALSE(negative(x(3).mul_(0)));
    CHECK(negative(x(-0.0).add_(-0.0)));
    CHECK_FALSE(negative(x(-0.0).add_(0.0)));
    CHECK(negative(x(-0.0).add_(x(3), -0.0)));
    CHECK(negative(x(3) * -0.0));
    CHECK(negative(x(-0.0) + -0.0));
    CHECK(negative(-0.0 * x(3)));
    CHECK(negative(-0.0 / x(3)));
    Tensor y = x(-0.0);
    CHECK(negative(div_(y, 2)));
    CHECK(negative(x(1).fill_(-0.0)));
    CHECK(negative(full({1}, -0.0, {.dtype = t})));
    CHECK(negative(where(eq(x(1), 1), -0.0, x(1))));
    CHECK(negative(maximum(x(-1), -0.0)));
    CHECK(negative(clamp(x(-1), -0.0, 1)));
    CHECK(negative(x(2).fill_(-0.0).mul_(1.0)));
  }
}

TEST_CASE("an integer of 64 bits is rounded to a float once") {
  const int64_t n = (int64_t{1} << 60) + (int64_t{1} << 36) + 1;  // as a double it is a tie in f32
  const float once = static_cast<float>(n);
  REQUIRE(once != static_cast<float>(static_cast<double>(n)));
  const Tensor zero = zeros({1}), one = ones({1});
  CHECK((zero + n).item<float>() == once);
  CHECK((one * n).item<float>() == once);
  CHECK((n - zero).item<float>() == once);
  CHECK(Tensor(zeros({1})).add_(n).item<float>() == once);
  CHECK(Tensor(zeros({1})).add_(one, n).item<float>() == once);
  CHECK(full({1}, n).item<float>() == once);
  CHECK(maximum(zero, n).item<float>() == once);
  CHECK(clamp(zero, n, n).item<float>() == once);
  CHECK(where(eq(one, 1), n, zero).item<float>() == once);
  CHECK(eq(full({1}, n), n).item<bool>());
  CHECK(full({1}, n, {.dtype = DType::i64}).to(DType::f32).item<float>() == once);
  CHECK(full({1}, n, {.dtype = DType::i64}).item<float>() == once);
  Tensor x = ones({1}).requires_grad_();
  CHECK(autograd::grad({x * n}, {x}, {one})[0].item<float>() == once);
  CHECK(autograd::grad({x * n}, {x}, {one}, {.create_graph = true})[0].detach().item<float>() ==
        once);
}

TEST_CASE("integers wrap around, at the ends of their range too") {
  constexpr int64_t least = std::numeric_limits<int64_t>::min();
  using I = std::vector<int64_t>;
  const auto integers = [](const Tensor& t) { return t.to_vector<int64_t>(); };
  const Tensor x = tensor(I{least});
  CHECK(integers(-x) == I{least});
  CHECK(integers(abs(x)) == I{least});
  CHECK(integers(x - 1) == I{std::numeric_limits<int64_t>::max()});
  CHECK(integers(x * -1) == I{least});
  CHECK(integers(square(x)) == I{0});
  CHECK(integers(pow(x, 3)) == I{0});
  CHECK(integers(Tensor(x.clone()).add_(x)) == I{0});
  CHECK(integers(Tensor(x.clone()).mul_(-1)) == I{least});
  CHECK(integers(Tensor(x.clone()).add_(x, std::numeric_limits<int64_t>::max())) == I{0});
  // Division gives f32.
  CHECK(values(x / -1) == V{0x1p63});
  CHECK(values(x / 0) == V{-std::numeric_limits<double>::infinity()});
  CHECK(std::isnan((tensor(I{0}) / 0).item<double>()));
  const Tensor i = tensor(std::vector<int32_t>{INT32_MIN});
  CHECK(integers(-i) == I{INT32_MIN});
  CHECK(integers(abs(i)) == I{INT32_MIN});
  CHECK(integers(i * i) == I{0});
  CHECK(integers(i + -1) == I{INT32_MAX});
  CHECK(integers(arange(least, std::numeric_limits<int64_t>::max(), int64_t{1} << 62)) ==
        I{least, least / 2, 0, -(least / 2)});
}

TEST_CASE("integers are not rounded on their way through an op with a number") {
  const int64_t big = (int64_t{1} << 62) + 1;  // no f32 or f64
  const Tensor x = tensor(std::vector<int64_t>{big, -big, 0});
  using I = std::vector<int64_t>;
  const auto integers = [](const Tensor& t) { return t.to_vector<int64_t>(); };
  CHECK(integers(x + 1) == I{big + 1, -big + 1, 1});
  CHECK(integers(1 - x) == I{1 - big, 1 + big, 1});
  CHECK(integers(x * -1) == I{-big, big, 0});
  CHECK(integers(maximum(x, big - 1)) == I{big, big - 1, big - 1});
  CHECK(integers(minimum(x, -big + 1)) == I{-big + 1, -big, -big + 1});
  CHECK(integers(clamp(x, -big + 1, big - 1)) == I{big - 1, -big + 1, 0});
  CHECK(integers(abs(x)) == I{big, big, 0});
  CHECK(integers(square(x)) ==
        I{int64_t(uint64_t(big) * uint64_t(big)), int64_t(uint64_t(big) * uint64_t(big)), 0});
  CHECK(integers(pow(tensor(I{3}), 39)) == I{4052555153018976267});
  CHECK(integers(where(gt(x, 0), x, big + 2)) == I{big, big + 2, big + 2});
  CHECK(integers(where(gt(x, 0), big + 2, x)) == I{big + 2, -big, 0});
  CHECK(values(eq(x, big)) == V{1, 0, 0});
  CHECK(values(eq(x, big - 1)) == V{0, 0, 0});
  CHECK(values(gt(x, big - 1)) == V{1, 0, 0});
  CHECK(integers(where(tensor(V{1, 0, 1}).to(DType::boolean), x, -x)) == I{big, big, 0});
}

TEST_CASE("comparisons of integers with fractions, large floats, infinity and NaN are exact") {
  const int64_t big = int64_t{1} << 62, most = std::numeric_limits<int64_t>::max();
  const Tensor x = tensor(std::vector<int64_t>{(1 << 24) + 1, -1, big + 1, most});
  CHECK(values(gt(x, (1 << 24) + 0.5)) == V{1, 0, 1, 1});
  CHECK(values(lt(x, (1 << 24) + 1.5)) == V{1, 1, 0, 0});
  CHECK(values(eq(x, (1 << 24) + 0.5)) == V{0, 0, 0, 0});
  CHECK(values(eq(x, 0x1p62)) == V{0, 0, 0, 0});
  CHECK(values(gt(x, 0x1p62)) == V{0, 0, 1, 1});
  CHECK(values(lt(x, 0x1p63)) == V{1, 1, 1, 1});
  CHECK(values(ge(x, 0x1p63)) == V{0, 0, 0, 0});
  CHECK(values(ge(x, -0x1p63)) == V{1, 1, 1, 1});
  CHECK(values(ne(x, -1.0)) == V{1, 0, 1, 1});
  CHECK(values(lt(x, std::numeric_limits<double>::infinity())) == V{1, 1, 1, 1});
  CHECK(values(ne(x, std::numeric_limits<double>::quiet_NaN())) == V{1, 1, 1, 1});
  CHECK(values(lt(x, std::numeric_limits<uint64_t>::max())) == V{1, 1, 1, 1});
  CHECK(values(lt(tensor(V{3, 200}).to(DType::u8), 3.5)) == V{1, 0});
  CHECK(values(eq(tensor(V{0, 1}).to(DType::boolean), 0.5)) == V{0, 0});
}

TEST_CASE("gelu, silu and softplus keep their digits in the tails, and so do their derivatives") {
  for (DType t : {DType::f32, DType::f64})
    for (double a : {-3., -4., -5., -5.5, -6., -8., -10., -12.}) {
      Tensor x = full({1}, a, {.dtype = t}).requires_grad_();
      const double tolerance = t == DType::f32 ? 3e-7 : 1e-14;
      const auto close = [&](const Tensor& y, double want) {
        CHECK(y.detach().item<double>() == doctest::Approx(want).epsilon(tolerance).scale(0));
      };
      // In more digits: the tail multiplies the rounding of a / sqrt(2) by a^2.
      const long double cdf = std::erfc(-a / std::sqrt(2.0L)) / 2;
      const long double density = std::exp(-0.5L * a * a) / std::sqrt(2 * std::acos(-1.0L));
      const Tensor y = gelu(x);
      close(y, static_cast<double>(a * cdf));
      close(autograd::grad({y}, {x})[0], static_cast<double>(cdf + a * density));
      const double s = 1 / (1 + std::exp(-a));
      close(silu(x), a * s);
      close(autograd::grad({silu(x)}, {x})[0], s * (1 + a * (1 - s)));
      close(softplus(x), std::log1p(std::exp(a)));
      close(softplus(-x), -a + std::log1p(std::exp(a)));
      close(autograd::grad({softplus(x)}, {x})[0], s);
    }
  // Right of 700 and left of it exp overflows in f64.
  CHECK(values(softplus(of({-1e4, 1e4}, DType::f64))) == V{0, 1e4});
}

TEST_CASE("where inside and around sqrt keeps the gradient finite on the branch not taken") {
  Tensor x = of({0, 4}).requires_grad_();
  const Tensor taken = gt(x.detach(), 1);
  const Tensor y = where(taken, sqrt(where(taken, x, 1)), 0);
  CHECK(values(y.detach()) == V{0, 2});
  CHECK(values(autograd::grad({y}, {x}, {of({1, 1})})[0]) == V{0, 0.25});
}

TEST_CASE("gradients of promoted operands have the operands' dtypes") {
  Tensor a = of({1, 2}).requires_grad_(), b = of({3, 4}, DType::f64).requires_grad_();
  const auto g = autograd::grad({a * b}, {a, b}, {of({1, 1}, DType::f64)});
  CHECK(g[0].dtype() == DType::f32);
  CHECK(values(g[0]) == V{3, 4});
  CHECK(values(g[1]) == V{1, 2});
}

TEST_CASE("maximum and minimum of equal inputs share the gradient; kinks are PyTorch's") {
  Tensor a = of({1, 2, 3}).requires_grad_(), b = of({2, 2, 2}).requires_grad_();
  const Tensor dy = of({4, 4, 4});
  auto g = autograd::grad({maximum(a, b)}, {a, b}, {dy});
  CHECK(values(g[0]) == V{0, 2, 4});
  CHECK(values(g[1]) == V{4, 2, 0});
  g = autograd::grad({minimum(a, b)}, {a, b}, {dy});
  CHECK(values(g[0]) == V{4, 2, 0});
  CHECK(values(g[1]) == V{0, 2, 4});
  Tensor x = of({-1, 0, 1}).requires_grad_();
  CHECK(values(autograd::grad({relu(x)}, {x}, {dy})[0]) == V{0, 0, 4});
  CHECK(values(autograd::grad({abs(x)}, {x}, {dy})[0]) == V{-4, 0, 4});
  CHECK(values(autograd::grad({clamp(x, -1, 1)}, {x}, {dy})[0]) == V{4, 4, 4});
  CHECK(values(autograd::grad({pow(x, 0)}, {x}, {dy})[0]) == V{0, 0, 0});
  CHECK(values(autograd::grad({leaky_relu(x, 0.5)}, {x}, {dy})[0]) == V{2, 2, 4});
  CHECK(values(autograd::grad({maximum(x, 0)}, {x}, {dy})[0]) == V{0, 2, 4});
  CHECK(values(autograd::grad({minimum(x, 0)}, {x}, {dy})[0]) == V{4, 2, 0});
  CHECK(values(autograd::grad({clamp(x, 0, 0)}, {x}, {dy})[0]) == V{0, 4, 0});
  CHECK(values(autograd::grad({clamp(x, 1, -1)}, {x}, {dy})[0]) == V{0, 0, 0});
}

TEST_CASE("where") {
  const Tensor c = of({1, 0, 1}, DType::boolean);
  Tensor a = of({1, 2, 3}).requires_grad_(), b = of({10}).requires_grad_();
  const Tensor y = where(c, a, b);
  CHECK(values(y.detach()) == V{1, 10, 3});
  const auto g = autograd::grad({y}, {a, b}, {of({5, 6, 7})});
  CHECK(values(g[0]) == V{5, 0, 7});
  CHECK(values(g[1]) == V{6});
  CHECK(values(where(c, a, 0).detach()) == V{1, 0, 3});
  CHECK(values(where(c, -1, a).detach()) == V{-1, 2, -1});
  CHECK(where(c, a, of({1, 2, 3}, DType::i64)).dtype() == DType::f32);
  CHECK(values(where(of({1, 0}, DType::boolean).unsqueeze(1), of({1, 2}, DType::u8),
                     of({3}, DType::u8))) == V{1, 2, 3, 3});
  // What is not chosen does not leak, not even NaN.
  Tensor x = of({-1, 4}).requires_grad_();
  CHECK(
      values(autograd::grad({where(gt(x.detach(), 0), x, std::numeric_limits<double>::quiet_NaN())},
                            {x}, {of({1, 1})})[0]) == V{0, 1});
  CHECK_THROWS_AS(where(a, a, b), DTypeError);
  CHECK_THROWS_AS(where(c, a, of({1, 2})), ShapeError);
}

TEST_CASE("shapes that do not broadcast are an error that names op and shapes") {
  CHECK_THROWS_AS(ones({2, 3}) + ones({2}), ShapeError);
  try {
    mul(ones({2, 3}), ones({4}));
    FAIL("no error");
  } catch (const ShapeError& e) {
    const std::string text = e.what();
    CHECK(text.find("mul") != std::string::npos);
    CHECK(text.find("[2, 3]") != std::string::npos);
    CHECK(text.find("[4]") != std::string::npos);
  }
}

TEST_CASE("relu reuses the storage of a last handle that nothing else refers to") {
  Tensor t = of({-1, 2});
  const void* bytes = t.data_ptr();
  Tensor y = relu(std::move(t));
  CHECK(y.data_ptr() == bytes);
  CHECK(values(y) == V{0, 2});
  CHECK((std::move(y) * 3.0).data_ptr() == bytes);

  Tensor kept = of({-1, 2}), alias = kept;
  CHECK(relu(kept).data_ptr() != kept.data_ptr());
  CHECK(relu(std::move(alias)).data_ptr() != kept.data_ptr());
  CHECK(values(kept) == V{-1, 2});
  CHECK(relu(kept.slice(0, {0, 1})).data_ptr() != kept.data_ptr());
  CHECK(values(kept) == V{-1, 2});

  float mine[] = {-1, 2};
  relu(from_blob(mine, {2}));
  CHECK(mine[0] == -1);

  // silu's derivative reads its input.
  Tensor s = of({-1, 2});
  const void* at = s.data_ptr();
  CHECK(silu(std::move(s)).data_ptr() != at);
}

TEST_CASE("reuse of storage never changes what backward needs") {
  Tensor x = of({-1, 0.5, 2}).requires_grad_();
  const Tensor w = of({1, 1, 1});
  const V want = values(autograd::grad({relu(sigmoid(x) + 0.0)}, {x}, {w})[0]);
  CHECK(values(autograd::grad({relu(sigmoid(x))}, {x}, {w})[0]) ==
        want);               // sigmoid keeps its output
  Tensor y = relu(x * 1.0);  // in place, and keeps its output
  const void* bytes = y.data_ptr();
  Tensor z = std::move(y) * 2.0;
  CHECK(z.data_ptr() != bytes);
  CHECK(values(autograd::grad({z}, {x}, {w})[0]) == V{0, 2, 2});
  const void* leaf_bytes = x.data_ptr();
  CHECK(relu(std::move(x)).data_ptr() != leaf_bytes);  // a leaf's values are the user's
}

TEST_CASE("in-place ops on a leaf, or on what backward needs, are errors") {
  Tensor leaf = of({1, 2}).requires_grad_();
  CHECK_THROWS_AS(relu_(leaf), AutogradError);
  CHECK_THROWS_AS(leaf.add_(1), AutogradError);
  {
    NoGradGuard guard;
    leaf.add_(1);
    CHECK(values(leaf) == V{2, 3});
  }
  Tensor s = sigmoid(leaf);
  s.add_(1);
  CHECK_THROWS_AS(autograd::grad({s}, {leaf}, {of({1, 1})}),
                  AutogradError);  // sigmoid's output was changed
}

TEST_CASE("in-place ops with an operand that requires grad, that overlaps, or that does not fit") {
  Tensor w = of({3, 4}).requires_grad_();
  Tensor x = of({1, 2});
  x.mul_(w);
  CHECK(x.requires_grad());
  CHECK(values(autograd::grad({x}, {w}, {of({1, 1})})[0]) == V{1, 2});

  Tensor y = w * 1.0;
  y.mul_(y);
  CHECK(values(autograd::grad({y}, {w}, {of({1, 1})})[0]) == V{6, 8});

  Tensor m = of({1, 2, 3, 4}).view({2, 2});
  m.add_(m.t());
  CHECK(values(m) == V{2, 5, 5, 8});
  Tensor line = of({1, 2, 3, 4});
  Tensor tail = line.slice(0, {1, 4});
  tail.add_(line.slice(0, {0, 3}));
  CHECK(values(line) == V{1, 3, 5, 7});

  CHECK_THROWS_AS(x.add_(ones({3, 2})), ShapeError);
  Tensor repeated = ones({1}).expand({3});
  CHECK_THROWS_AS(repeated.add_(1), ShapeError);
  Tensor i = of({1, 2}, DType::i64);
  CHECK_THROWS_AS(i.add_(of({1, 2})), DTypeError);
  CHECK_THROWS_AS(i.mul_(0.5), DTypeError);
  CHECK_THROWS_AS(div_(i, 2), DTypeError);
  CHECK_THROWS_AS(sqrt_(i), DTypeError);
  i.mul_(3).add_(of({1, 1}, DType::i32), 2);
  CHECK(values(i) == V{5, 8});
  Tensor f = of({1, 2});
  f.add_(of({1, 1}, DType::f64));
  CHECK(f.dtype() == DType::f32);
}

TEST_CASE("in place, an operand of a wider dtype is not rounded before the op") {
  Tensor x = of({1, 0, 1e-30}, DType::f32);
  x.sub_(of({1 + 0x1p-30, 0, 0}, DType::f64));
  CHECK(x[0].item<double>() == -0x1p-30);
  x.mul_(of({1, 1e300, 1e40}, DType::f64));
  CHECK(x[1].item<double>() == 0);
  CHECK(x[2].item<float>() == static_cast<float>(static_cast<double>(1e-30f) * 1e40));

  Tensor small = of({250, 7}, DType::u8), count = of({1, 2}, DType::i32);
  small.add_(of({5, -3}, DType::i64));
  CHECK(values(small) == V{255, 4});
  count.mul_(of({3, 4}, DType::i64));
  CHECK(values(count) == V{3, 8});
  Tensor flag = of({0, 1}, DType::boolean);
  CHECK_THROWS_WITH_AS(flag.add_(count), doctest::Contains("bool"), DTypeError);

  const Tensor w = of({2, 3}, DType::f32).requires_grad_(),
               v = of({5, 7}, DType::f64).requires_grad_();
  Tensor h = w * 1.0;
  h.mul_(v);
  h.backward(ones({2}));
  CHECK(values(w.grad()) == V{5, 7});
  CHECK(values(v.grad()) == V{2, 3});
  CHECK(v.grad().dtype() == DType::f64);
  Tensor leaf = of({1, 2}).requires_grad_();
  CHECK_THROWS_WITH_AS(leaf.mul_(v), doctest::Contains("mul"), AutogradError);
}

TEST_CASE("ops keep for backward only what their derivatives read") {
  using namespace lockstep::formulas;
  CHECK(reads<Relu, 0> == (Probe::kY | Probe::kDy));
  CHECK(reads<Silu, 0> == (Probe::kA | Probe::kDy));
  CHECK(reads<Mul, 0> == (Probe::kB | Probe::kDy));
  CHECK(reads<Mul, 1> == (Probe::kA | Probe::kDy));
  CHECK(passes_on<Add, 0>);
  CHECK(passes_on<Sub, 0>);
  CHECK_FALSE(passes_on<Sub, 1>);
}

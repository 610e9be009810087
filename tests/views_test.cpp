// Views: other shapes over the same bytes. Values are compared with index arithmetic, gradients
// with finite differences and with weights that differ per element.
#include <doctest/doctest.h>

#include <vector>

#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using I = std::vector<int64_t>;
I values(const Tensor& t) { return t.to_vector<int64_t>(); }
bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.storage().data() == b.storage().data();
}
/// 0, 1, 2, ... as f64 that requires grad.
Tensor leaf(const Shape& shape) {
  return arange(0, shape.numel(), 1, {.dtype = DType::f64}).view(shape).clone().requires_grad_();
}

}  // namespace

TEST_CASE("view gives another shape without a copy, or says why it cannot") {
  const Tensor t = arange(0, 24).view({2, 3, 4});
  CHECK(t.shape() == Shape{2, 3, 4});
  CHECK(same_bytes(t.view({6, 4}), t));
  CHECK(t.view({-1, 8}).shape() == Shape{3, 8});
  CHECK(t.view({2, 3, 2, 2}).shape() == Shape{2, 3, 2, 2});
  CHECK(t.view({1, 24, 1})[0][5][0].item<int64_t>() == 5);
  CHECK(arange(3, 4).view({}).item<int64_t>() == 3);
  CHECK(t.transpose(0, 1).view({3, 2, 2, 2}).to_vector<int64_t>() ==
        t.transpose(0, 1).to_vector<int64_t>());
  CHECK_THROWS_WITH_AS(t.view({5, 5}), Contains("[2, 3, 4]"), ShapeError);
  CHECK_THROWS_AS(t.view({-1, -1}), ShapeError);
  CHECK_THROWS_AS(t.view({-1, 7}), ShapeError);
  CHECK_THROWS_AS(t.view({-4, -6}), ShapeError);
  CHECK_THROWS_WITH_AS(t.transpose(0, 1).view({6, 4}), Contains("reshape"), ShapeError);
  CHECK(zeros({2, 0}).view({0, 5}).shape() == Shape{0, 5});
}

TEST_CASE("reshape, flatten and contiguous copy only when they must") {
  const Tensor t = arange(0, 24).view({2, 3, 4}), swapped = t.transpose(0, 1);
  CHECK(same_bytes(t.reshape({4, -1}), t));
  CHECK_FALSE(same_bytes(swapped.reshape({6, 4}), t));
  CHECK(values(swapped.reshape({6, 4})) == values(swapped));
  CHECK(t.flatten().shape() == Shape{24});
  CHECK(t.flatten(1).shape() == Shape{2, 12});
  CHECK(t.flatten(0, 1).shape() == Shape{6, 4});
  CHECK(t.flatten(-2, -1).shape() == Shape{2, 12});
  CHECK(same_bytes(t.flatten(1), t));
  CHECK(scalar(1).flatten().shape() == Shape{1});
  CHECK_THROWS_AS(t.flatten(2, 1), Error);
  CHECK_THROWS_AS(t.flatten(3), IndexError);
  CHECK(t.contiguous().is_same(t));
  CHECK(swapped.contiguous().is_contiguous());
  CHECK(values(swapped.contiguous()) == values(swapped));
}

TEST_CASE("transpose and permute move dimensions over the same bytes") {
  const Tensor t = arange(0, 6).view({2, 3});
  CHECK(values(t.t()) == I{0, 3, 1, 4, 2, 5});
  CHECK(t.t().shape() == Shape{3, 2});
  CHECK(t.t().strides() == Strides{1, 3});
  CHECK(same_bytes(t.t(), t));
  const Tensor u = arange(0, 24).view({2, 3, 4}), p = u.permute({2, 0, -2});  // [4, 2, 3]
  CHECK(p.shape() == Shape{4, 2, 3});
  for (int64_t i : {0, 3})
    for (int64_t j : {0, 1})
      for (int64_t k : {0, 2}) CHECK(p[i][j][k].item<int64_t>() == j * 12 + k * 4 + i);
  CHECK(values(u.transpose(-1, 0)) == values(u.permute({2, 1, 0})));
  CHECK_THROWS_AS(u.permute({0, 1}), ShapeError);
  CHECK_THROWS_AS(u.permute({0, 1, 1}), ShapeError);
  CHECK_THROWS_AS(u.permute({0, 1, 3}), IndexError);
  CHECK_THROWS_WITH_AS(u.transpose(0, 3), Contains("transpose"), IndexError);
}

TEST_CASE("squeeze and unsqueeze drop and add sizes of one") {
  const Tensor t = arange(0, 3);
  CHECK(t.unsqueeze(0).shape() == Shape{1, 3});
  CHECK(t.unsqueeze(1).shape() == Shape{3, 1});
  CHECK(t.unsqueeze(-1).shape() == Shape{3, 1});
  CHECK(t.unsqueeze(-2).squeeze(0).shape() == Shape{3});
  CHECK(t.squeeze(0).shape() == Shape{3});  // not of size one: left alone
  CHECK(scalar(1).unsqueeze(0).shape() == Shape{1});
  CHECK(same_bytes(t.unsqueeze(0), t));
  CHECK_THROWS_AS(t.unsqueeze(2), IndexError);
  CHECK_THROWS_AS(t.squeeze(1), IndexError);
}

TEST_CASE("expand repeats without a copy; -1 keeps a size") {
  const Tensor t = arange(0, 3).view({3, 1});
  const Tensor e = t.expand({2, 3, 2});
  CHECK(e.shape() == Shape{2, 3, 2});
  CHECK(values(e) == I{0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2});
  CHECK(same_bytes(e, t));
  CHECK(t.expand({-1, 4}).shape() == Shape{3, 4});
  CHECK(t.expand({3, 0}).numel() == 0);
  CHECK_THROWS_WITH_AS(t.expand({2, 2}), Contains("[3, 1]"), ShapeError);
  CHECK_THROWS_AS(t.expand({3}), ShapeError);
  CHECK_THROWS_AS(t.expand({-1, 3, 1}), ShapeError);  // there is no size to keep
  CHECK_THROWS_AS(t.expand({3, -4}), ShapeError);
}

TEST_CASE("slice is Python's start:stop:step") {
  const Tensor t = arange(0, 10);
  CHECK(values(t.slice(0, {.start = 2, .stop = 5})) == I{2, 3, 4});
  CHECK(values(t.slice(0, {.start = 1, .step = 4})) == I{1, 5, 9});
  CHECK(values(t.slice(0, {.start = -3})) == I{7, 8, 9});
  CHECK(values(t.slice(0, {.stop = -8})) == I{0, 1});
  CHECK(values(t.slice(0, {.start = -4, .stop = -1, .step = 2})) == I{6, 8});
  CHECK(values(t.slice(0, {.start = 8, .stop = 100})) == I{8, 9});
  CHECK(values(t.slice(0, {.start = -100, .stop = 1})) == I{0});
  CHECK(t.slice(0, {.start = 5, .stop = 5}).numel() == 0);
  CHECK(t.slice(0, {.start = 7, .stop = 3}).numel() == 0);
  CHECK(t.slice(0, {.start = 10}).shape() == Shape{0});
  CHECK(same_bytes(t.slice(0, {.start = 2}), t));
  const Tensor m = arange(0, 12).view({3, 4});
  CHECK(values(m.slice(-1, {.start = 1, .step = 2})) == I{1, 3, 5, 7, 9, 11});
  CHECK(values(m.slice(0, {.start = 1}).slice(1, {.start = 2})) == I{6, 7, 10, 11});
  CHECK_THROWS_WITH_AS(t.slice(0, {.step = 0}), Contains("step"), ValueError);
  CHECK_THROWS_AS(t.slice(0, {.step = -1}), ValueError);
  CHECK_THROWS_AS(t.slice(1, {}), IndexError);
  CHECK_THROWS_AS(scalar(1).slice(0, {}), ShapeError);
}

TEST_CASE("narrow and select take a part, and an index outside is an error") {
  const Tensor m = arange(0, 12).view({3, 4});
  CHECK(values(m.narrow(0, 1, 2)) == I{4, 5, 6, 7, 8, 9, 10, 11});
  CHECK(m.narrow(1, 4, 0).shape() == Shape{3, 0});
  CHECK(values(m.select(1, 2)) == I{2, 6, 10});
  CHECK(values(m.select(-1, -1)) == I{3, 7, 11});
  CHECK(values(m[-1]) == I{8, 9, 10, 11});
  CHECK(m[1].shape() == Shape{4});
  CHECK(m[2][3].dim() == 0);
  CHECK(same_bytes(m[1], m));
  CHECK_THROWS_WITH_AS(m.narrow(0, 2, 2), Contains("narrow"), IndexError);
  CHECK_THROWS_AS(m.narrow(0, 0, -1), IndexError);
  CHECK_THROWS_WITH_AS(m.select(0, 3),
                       Contains("index 3 is out of range for dimension 0 of shape [3, 4]"),
                       IndexError);
  CHECK_THROWS_AS(m.select(0, -4), IndexError);
  CHECK_THROWS_AS(scalar(1)[0], ShapeError);
}

TEST_CASE("writing to a view writes to what it views, and only there") {
  Tensor t = zeros({3, 4});
  Tensor column = t.select(1, 2);
  column.copy_(arange(1, 4));
  Tensor odd = t.slice(1, {.start = 1, .step = 2}).narrow(0, 0, 1);
  odd.add_(10);
  CHECK(values(t) == I{0, 10, 1, 10, 0, 0, 2, 0, 0, 0, 3, 0});
  const uint32_t version = t.storage().version();
  t.view({12}).fill_(1);
  CHECK(t.storage().version() > version);
}

TEST_CASE("every view hands its gradient back to the elements it showed") {
  const auto check = [](const Shape& shape, const autograd::Differentiable& f) {
    CHECK_NOTHROW(autograd::gradcheck(f, {leaf(shape)}));
    CHECK_NOTHROW(autograd::gradgradcheck(
        [&](const std::vector<Tensor>& in) { return square(f({square(in[0])})); }, {leaf(shape)}));
  };
  using T = const std::vector<Tensor>&;
  check({2, 6}, [](T in) { return in[0].view({3, -1}); });
  check({2, 6}, [](T in) { return in[0].t().reshape({3, 4}); });
  check({2, 3, 2}, [](T in) { return in[0].flatten(1); });
  check({2, 3}, [](T in) { return in[0].transpose(0, 1); });
  check({2, 3, 2}, [](T in) { return in[0].permute({2, 0, 1}); });
  check({2, 1, 3}, [](T in) { return in[0].squeeze(1).unsqueeze(-1); });
  check({2, 1}, [](T in) { return in[0].expand({3, 2, 4}); });
  check({7}, [](T in) { return in[0].slice(0, {.start = 1, .step = 3}); });
  check({4, 3}, [](T in) { return in[0].narrow(0, 1, 2); });
  check({4, 3}, [](T in) { return in[0].select(1, -1); });
  check({2, 3}, [](T in) { return in[0].t().contiguous(); });
  check({2, 3}, [](T in) { return in[0].t().clone(); });
}

TEST_CASE("two views of one tensor add up where they overlap") {
  const Tensor x = leaf({4});
  (x.narrow(0, 0, 3).sum() + x.slice(0, {.start = 2}).sum() * 10.0).backward();
  CHECK(values(x.grad()) == I{1, 1, 11, 10});
}

TEST_CASE("views require grad like what they view, but are no leaves") {
  const Tensor x = leaf({4});
  const Tensor v = x.view({2, 2});
  CHECK(v.requires_grad());
  CHECK_FALSE(v.is_leaf());
  CHECK_FALSE(v.grad().defined());
  NoGradGuard guard;
  CHECK_FALSE(x.view({2, 2}).requires_grad());
}

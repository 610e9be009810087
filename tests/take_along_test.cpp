// take_along and put_along: what they refuse, and indices that change before backward.
#include <doctest/doctest.h>

#include <vector>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/take_along.h>

using namespace lockstep;
using doctest::Contains;

TEST_CASE("take_along and put_along refuse indices out of range, wrong shapes and dtypes") {
  const Tensor x = ones({2, 3}), picked = ones({2, 1});
  for (int64_t bad : {int64_t{3}, int64_t{-1}, int64_t{1000000}, INT64_MIN, INT64_MAX}) {
    const Tensor i = tensor<int64_t>({0, bad}, {2, 1});
    CHECK_THROWS_WITH_AS(take_along(x, i, 1),
                         Contains("indices are in [0, 3), the size of dimension 1"), IndexError);
    CHECK_THROWS_AS(put_along(picked, i, 1, {2, 3}), IndexError);
    CHECK_THROWS_AS(take_along(x, i, -1), IndexError);
  }
  const Tensor i = zeros({2, 1}, {.dtype = DType::i64});
  CHECK_THROWS_AS(take_along(x, i, 2), IndexError);
  CHECK_THROWS_AS(take_along(x, i, 0), ShapeError);
  CHECK_THROWS_AS(take_along(x, zeros({2}, {.dtype = DType::i64}), 1), ShapeError);
  CHECK_THROWS_AS(take_along(x, zeros({2, 1}), 1), DTypeError);
  CHECK_THROWS_AS(put_along(ones({2, 2}), i, 1, {2, 3}), ShapeError);
  CHECK_THROWS_AS(put_along(picked, i, 1, {3, 3}), ShapeError);
  CHECK_THROWS_AS(take_along(zeros({2, 0}), i, 1), IndexError);
  CHECK_THROWS_AS(take_along(scalar(1), tensor<int64_t>({1}).squeeze(0), 0), IndexError);
  CHECK(take_along(x, i, -1).shape() == Shape{2, 1});
}

TEST_CASE("take_along: many elements, from several threads, each from its place") {
  const Tensor x = arange(0, 90000).reshape({300, 3, 100});
  std::vector<int64_t> places;
  for (int64_t i = 0; i < 30000; ++i) places.push_back(i * 7 % 3);
  const Tensor index = tensor(places, {300, 1, 100});
  const auto got = take_along(x, index, 1).to_vector<int64_t>();
  for (int64_t i = 0; i < 30000; ++i)
    REQUIRE(got[static_cast<size_t>(i)] ==
            i / 100 * 300 + places[static_cast<size_t>(i)] * 100 + i % 100);
}

TEST_CASE("indices that change before backward are an error, not a write out of bounds") {
  const Tensor x = tensor<float>({1, 3, 2, 9, 7, 8}, {2, 3}).requires_grad_();
  auto [values, indices] = max(x, 1);
  indices.add_(1000000);
  CHECK_THROWS_AS(values.sum().backward(), AutogradError);

  Tensor i = tensor<int64_t>({0, 2}, {2, 1});
  const Tensor y = take_along(x, i, 1);
  i.fill_(5);
  CHECK_THROWS_AS(y.sum().backward(), AutogradError);

  Tensor target = tensor<int64_t>({0, 2});
  const Tensor loss = cross_entropy(x, target);
  target.fill_(77);
  CHECK_THROWS_AS(loss.backward(), AutogradError);
}

// max_pool2d against loops over windows, in both memory orders.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/ops/pool.h>
#include <lockstep/tensor/parallel.h>

#include "op_check.h"

using namespace lockstep;
using namespace op_check;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Inputs = const std::vector<Tensor>&;

Tensor channels_last(const Tensor& t) {
  return t.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
}

struct Reference {
  Shape shape;
  V y, dx;  // dx for dy = 1, 2, 3, ...
};
Reference reference(const Tensor& x, Size2d window, Size2d stride, Size2d pad) {
  const V v = x.to_vector<double>();
  const int64_t h = x.size(2), w = x.size(3);
  Reference r{{x.size(0), x.size(1), (h + 2 * pad.h - window.h) / stride.h + 1,
               (w + 2 * pad.w - window.w) / stride.w + 1},
              {},
              V(v.size())};
  for (int64_t plane = 0; plane < x.size(0) * x.size(1); ++plane)
    for (int64_t oy = 0; oy < r.shape[2]; ++oy)
      for (int64_t ox = 0; ox < r.shape[3]; ++ox) {
        int64_t best = -1;
        for (int64_t iy = oy * stride.h - pad.h; iy < oy * stride.h - pad.h + window.h; ++iy)
          for (int64_t ix = ox * stride.w - pad.w; ix < ox * stride.w - pad.w + window.w; ++ix) {
            if (iy < 0 || iy >= h || ix < 0 || ix >= w) continue;
            const int64_t i = (plane * h + iy) * w + ix;
            if (best < 0 || v[static_cast<size_t>(i)] > v[static_cast<size_t>(best)] ||
                std::isnan(v[static_cast<size_t>(i)]))
              best = i;
          }
        r.y.push_back(v[static_cast<size_t>(best)]);
        r.dx[static_cast<size_t>(best)] += static_cast<double>(r.y.size());
      }
  return r;
}

void check_case(const Tensor& x, Size2d window, MaxPool2dOptions o) {
  const Size2d stride = o.stride.value_or(window);
  const Reference want = reference(x, window, stride, o.padding);
  for (DType dtype : {DType::f32, DType::f64})
    for (bool last : {false, true}) {
      INFO(str_cat("x ", x.shape(), ", ", dtype, ", window ", window.h, "x", window.w, ", stride ",
                   stride.h, "x", stride.w, ", padding ", o.padding.h, "x", o.padding.w,
                   ", channels-last ", last));
      const Tensor xi =
          (last ? channels_last(x.to(dtype)) : x.to(dtype)).detach().clone().requires_grad_();
      const Tensor y = max_pool2d(xi, window, o);
      REQUIRE(y.shape() == want.shape);
      CHECK(y.dtype() == dtype);
      CHECK((last ? y.is_channels_last() : y.is_contiguous()));
      check_close("y", y, want.y, 1e-6);
      const Tensor dy = arange(1, y.numel() + 1, 1, {.dtype = dtype}).view(y.shape());
      y.backward(last ? dy : channels_last(dy));  // in the other order, on purpose
      check_close("dx", xi.grad(), want.dx, 1e-6);
      CHECK((last ? xi.grad().is_channels_last() : xi.grad().is_contiguous()));
    }
}

}  // namespace

TEST_CASE("windows, strides and padding of every kind agree with loops") {
  auto make = [seed = 0u](int64_t h, int64_t w) mutable {
    return random_tensor({3, 5, h, w}, DType::f64, ++seed);
  };
  check_case(make(6, 8), 2, {});  // tiles the image
  check_case(make(7, 9), 2, {});  // leaves a rest
  check_case(make(6, 9), {2, 3}, {});
  check_case(make(7, 7), 3, {.stride = 1});  // overlaps
  check_case(make(7, 7), 3, {.stride = 2, .padding = 1});
  check_case(make(8, 6), {4, 2}, {.stride = Size2d{1, 2}, .padding = {2, 1}});
  check_case(make(9, 9), 2, {.stride = 3});  // skips elements
  check_case(make(5, 5), 2, {.padding = 1});
  check_case(make(5, 4), 1, {});  // the identity
  check_case(make(5, 5), 1, {.stride = 2});
  check_case(make(4, 3), {4, 3}, {});  // the whole image
  check_case(make(1, 1), 2, {.padding = 1});
}

TEST_CASE("one image or many, one channel or many") {
  for (int64_t n : {1, 2, 9, 17})
    for (int64_t c : {1, 2, 16, 33}) check_case(random_tensor({n, c, 4, 6}, DType::f64, 20), 2, {});
}

TEST_CASE("of equal values the first in row-major order gets the gradient") {
  check_case(ones({2, 3, 4, 4}, {.dtype = DType::f64}), 2, {});
  check_case(ones({2, 3, 5, 5}, {.dtype = DType::f64}), 3, {.stride = 1});
  check_case(zeros({2, 3, 5, 5}, {.dtype = DType::f64}), 3, {.stride = 2, .padding = 1});
  Tensor x = ones({1, 1, 2, 2}, {.dtype = DType::f64}).requires_grad_();
  max_pool2d(x, 2).sum().backward();
  CHECK(x.grad().to_vector<double>() == V{1, 0, 0, 0});
}

TEST_CASE("padding never wins, not even over minus infinity") {
  check_case(full({2, 3, 4, 4}, -5, {.dtype = DType::f64}), 3, {.stride = 1, .padding = 1});
  const Tensor x = full({1, 1, 2, 2}, -INFINITY);
  for (double v : max_pool2d(x, 2, {.padding = 1}).to_vector<double>()) CHECK(v == -INFINITY);
  Tensor g = full({1, 1, 2, 2}, -INFINITY).requires_grad_();
  max_pool2d(g, 2, {.padding = 1}).sum().backward();
  CHECK(g.grad().to_vector<double>() == V{1, 1, 1, 1});
}

TEST_CASE("NaN wins over all, wherever it stands, and takes the gradient") {
  for (size_t at = 0; at < 4; ++at) {
    V v{1, INFINITY, -2, 3};
    v[at] = NAN;
    check_case(tensor(v, {1, 1, 2, 2}), 2, {});
  }
  V v(32);
  for (size_t i = 0; i < v.size(); ++i) v[i] = i % 7 == 3 ? NAN : static_cast<double>(i % 5);
  const Tensor x = tensor(v, {1, 2, 4, 4});
  const V y = max_pool2d(x, 2).to_vector<double>(), want = reference(x, 2, 2, 0).y;
  for (size_t i = 0; i < y.size(); ++i) CHECK(std::isnan(y[i]) == std::isnan(want[i]));
}

TEST_CASE("an image that is a view is read as what it shows") {
  const Tensor big = random_tensor({4, 5, 9, 8}, DType::f64, 30);
  const Tensor x =
      big.slice(0, {.step = 2}).narrow(1, 1, 3).slice(2, {.start = 1, .step = 2}).transpose(2, 3);
  check_close("y", max_pool2d(x, 2), reference(x, 2, 2, 0).y, 0);
  const Tensor part = channels_last(big).narrow(1, 2, 2);
  check_close("channels of a channels-last image", max_pool2d(part, 3), reference(part, 3, 3, 0).y,
              0);
}

TEST_CASE("first and second derivatives") {
  const std::pair<Size2d, MaxPool2dOptions> cases[] = {
      {2, {}}, {3, {.stride = 1}}, {3, {.stride = 2, .padding = 1}}, {{1, 2}, {}}};
  for (const auto& c : cases)
    for (bool last : {false, true}) {
      const auto f = [&](Inputs in) {
        const Tensor x = last ? channels_last(in[0]) : in[0];
        return square(max_pool2d(x * x * x, c.first, c.second));  // so that dy depends on x as well
      };
      const Tensor x = random_tensor({2, 2, 4, 6}, DType::f64, 31).requires_grad_();
      CHECK_NOTHROW(autograd::gradcheck(f, {x}));
      CHECK_NOTHROW(autograd::gradgradcheck(f, {x}));
    }
}

TEST_CASE("the bits of result and gradient do not depend on the number of threads") {
  const int before = get_num_threads();
  for (bool last : {false, true}) {
    const auto run = [last](int threads) {
      set_num_threads(threads);
      const Tensor plain = random_tensor({9, 4, 8, 8}, DType::f32, 32);
      const Tensor x = (last ? channels_last(plain) : plain).clone().requires_grad_();
      const Tensor y = max_pool2d(x, 3, {.stride = 1});
      y.backward(random_tensor(y.shape(), DType::f32, 33));
      return std::pair{y.detach(), x.grad()};
    };
    const auto one = run(1), three = run(3);
    CHECK(std::memcmp(one.first.data_ptr(), three.first.data_ptr(),
                      static_cast<size_t>(one.first.numel()) * 4) == 0);
    CHECK(std::memcmp(one.second.data_ptr(), three.second.data_ptr(),
                      static_cast<size_t>(one.second.numel()) * 4) == 0);
  }
  set_num_threads(before);
}

TEST_CASE("no images give no images; errors name the rule and the values") {
  CHECK(max_pool2d(zeros({0, 3, 4, 4}), 2).shape() == Shape{0, 3, 2, 2});
  const Tensor x = zeros({2, 3, 4, 5});
  CHECK_THROWS_WITH_AS(max_pool2d(zeros({3, 4, 5}), 2), Contains("[3, 4, 5]"), ShapeError);
  CHECK_THROWS_WITH_AS(max_pool2d(x, 5),
                       Contains("the window 5x5 is larger than the padded input [2, 3, 4, 5]"),
                       ShapeError);
  CHECK_THROWS_WITH_AS(max_pool2d(x, 2, {.padding = 2}), Contains("more than half of the window"),
                       ValueError);
  CHECK_THROWS_AS(max_pool2d(x, 2, {.padding = -1}), ValueError);
  CHECK_THROWS_AS(max_pool2d(x, 0), ValueError);
  CHECK_THROWS_AS(max_pool2d(x, 2, {.stride = Size2d{1, 0}}), ValueError);
  for (const Shape& shape : {Shape{1, 1, 0, 4}, {1, 1, 4, 0}, {0, 2, 0, 4}})
    CHECK_THROWS_WITH_AS(max_pool2d(zeros(shape), 2, {.padding = 1}), Contains("have no pixels"),
                         ShapeError);
}

TEST_CASE("max_pool2d of integers") {
  for (DType t : {DType::u8, DType::i32, DType::i64}) {
    const Tensor x = tensor<double>({1, 200, 3, 4, 5, 6, 7, 8, 255}, {1, 1, 3, 3}).to(t);
    const Tensor y = max_pool2d(x, 2, {.stride = Size2d(1)});
    CHECK(y.dtype() == t);
    CHECK(y.to_vector<double>() == std::vector<double>{200, 200, 8, 255});
  }
  const int64_t big = (int64_t{1} << 53) + 1;
  CHECK(max_pool2d(tensor<int64_t>({big - 1, big}, {1, 1, 1, 2}), {1, 2}).item<int64_t>() == big);
}

TEST_CASE("max_pool2d with windows, strides and padding of any size does not overflow") {
  const Tensor x = tensor<float>({1, 2, 3, 4, 5, 6}, {1, 1, 2, 3}).requires_grad_();
  const int64_t most = INT64_MAX, far = int64_t{1} << 40;
  CHECK(max_pool2d(x, 2, {.stride = Size2d(most)}).item<double>() == 5);
  // A window of which nearly all is padding holds the whole image.
  const Tensor y = max_pool2d(x, 2 * far, {.stride = Size2d(most), .padding = far});
  CHECK(y.item<double>() == 6);
  y.sum().backward();
  CHECK(x.grad().to_vector<double>() == std::vector<double>{0, 0, 0, 0, 0, 1});
  CHECK_THROWS_AS(max_pool2d(x, most, {.padding = most / 2 + 1}), ValueError);
  CHECK_THROWS_AS(max_pool2d(x, most, {.padding = most}), ValueError);
  CHECK_THROWS_AS(max_pool2d(x, most), ShapeError);
  CHECK_THROWS_AS(max_pool2d(x, most, {.padding = most / 2}), ShapeError);
}

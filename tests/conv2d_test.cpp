// conv2d against seven loops in double: every option, both memory orders, and batches that do not
// divide into equal blocks.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/parallel.h>

#include "op_check.h"

using namespace lockstep;
using namespace op_check;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Inputs = const std::vector<Tensor>&;

/// Calls f(index in x, index in w, index in y) for each product that a convolution adds up.
template <class F>
void for_each_product(const Shape& x, const Shape& w, const Shape& y, const Conv2dOptions& o, F f) {
  const int64_t in = w[1], out = w[0] / o.groups;  // channels of a group
  for (int64_t n = 0; n < y[0]; ++n)
    for (int64_t oc = 0; oc < y[1]; ++oc)
      for (int64_t oy = 0; oy < y[2]; ++oy)
        for (int64_t ox = 0; ox < y[3]; ++ox)
          for (int64_t ic = 0; ic < in; ++ic)
            for (int64_t ky = 0; ky < w[2]; ++ky)
              for (int64_t kx = 0; kx < w[3]; ++kx) {
                const int64_t iy = oy * o.stride.h - o.padding.h + ky * o.dilation.h;
                const int64_t ix = ox * o.stride.w - o.padding.w + kx * o.dilation.w;
                if (iy < 0 || iy >= x[2] || ix < 0 || ix >= x[3]) continue;
                const int64_t c = oc / out * in + ic;
                f(static_cast<size_t>(((n * x[1] + c) * x[2] + iy) * x[3] + ix),
                  static_cast<size_t>(((oc * in + ic) * w[2] + ky) * w[3] + kx),
                  static_cast<size_t>(((n * y[1] + oc) * y[2] + oy) * y[3] + ox));
              }
}

struct Reference {
  V y, dx, dw, db;
};
Reference reference(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy,
                    const Conv2dOptions& o) {
  const V xv = x.to_vector<double>(), wv = w.to_vector<double>(), dyv = dy.to_vector<double>();
  Reference r{V(dyv.size()), V(xv.size()), V(wv.size()), V(static_cast<size_t>(w.size(0)))};
  const int64_t pixels = dy.size(2) * dy.size(3);
  for (size_t i = 0; i < dyv.size(); ++i) {
    const size_t channel = i / static_cast<size_t>(pixels) % r.db.size();
    if (b.defined()) r.y[i] = b.to_vector<double>()[channel];
    r.db[channel] += dyv[i];
  }
  for_each_product(x.shape(), w.shape(), dy.shape(), o, [&](size_t i, size_t k, size_t j) {
    r.y[j] += xv[i] * wv[k];
    r.dx[i] += dyv[j] * wv[k];
    r.dw[k] += dyv[j] * xv[i];
  });
  return r;
}

/// Forward and all gradients of one convolution, for both memory orders of x and of dy.
void check_case(DType dtype, const Shape& x_shape, const Shape& w_shape, const Shape& y_shape,
                Conv2dOptions o, bool with_bias = true) {
  const double tolerance = dtype == DType::f32 ? 1e-4 : 1e-11;
  const Tensor x = random_tensor(x_shape, dtype, 1), w = random_tensor(w_shape, dtype, 2),
               b = with_bias ? random_tensor({w_shape[0]}, dtype, 3) : Tensor(),
               dy = random_tensor(y_shape, dtype, 4);
  const Reference want = reference(x, w, b, dy, o);
  const auto last = [](const Tensor& t) {
    return t.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
  };
  for (bool channels_last : {false, true}) {
    INFO(str_cat(dtype, ", x ", x_shape, ", w ", w_shape, ", groups ", o.groups, ", bias ",
                 with_bias, ", channels-last ", channels_last));
    Tensor xi = (channels_last ? last(x) : x.clone()).requires_grad_(),
           wi = w.clone().requires_grad_(), bi;
    if (with_bias) bi = b.clone().requires_grad_();
    const Tensor y = conv2d(xi, wi, bi, o);
    REQUIRE(y.shape() == y_shape);
    CHECK(y.dtype() == dtype);
    CHECK(y.is_channels_last());
    check_close("y", y, want.y, tolerance);
    y.backward(channels_last ? last(dy) : dy);
    check_close("dx", xi.grad(), want.dx, tolerance);
    check_close("dw", wi.grad(), want.dw, tolerance);
    if (with_bias) check_close("db", bi.grad(), want.db, tolerance);
  }
}

}  // namespace

TEST_CASE("stride, padding, dilation and kernel shape, alone and together") {
  for (DType dtype : {DType::f32, DType::f64}) {
    check_case(dtype, {2, 3, 7, 6}, {4, 3, 3, 3}, {2, 4, 5, 4}, {});
    check_case(dtype, {2, 3, 7, 6}, {4, 3, 3, 3}, {2, 4, 7, 6}, {.padding = 1});
    check_case(dtype, {2, 3, 7, 6}, {4, 3, 3, 3}, {2, 4, 3, 2}, {.stride = 2});
    check_case(dtype, {2, 3, 8, 9}, {4, 3, 3, 3}, {2, 4, 4, 5}, {.dilation = 2});
    check_case(dtype, {2, 3, 7, 9}, {5, 3, 2, 4}, {2, 5, 6, 6}, {});
    check_case(dtype, {2, 3, 7, 9}, {5, 3, 3, 2}, {2, 5, 4, 8},
               {.stride = {2, 1}, .padding = {1, 0}});
    check_case(dtype, {2, 3, 9, 9}, {4, 3, 3, 3}, {2, 4, 5, 5},
               {.stride = {2, 3}, .padding = {2, 3}, .dilation = {2, 1}});
  }
}

TEST_CASE("pointwise kernels, kernels as large as the image, and images of one pixel") {
  for (DType dtype : {DType::f32, DType::f64}) {
    check_case(dtype, {2, 5, 4, 3}, {6, 5, 1, 1}, {2, 6, 4, 3}, {});
    check_case(dtype, {2, 5, 5, 5}, {6, 5, 1, 1}, {2, 6, 3, 3}, {.stride = 2});
    check_case(dtype, {2, 3, 4, 5}, {4, 3, 4, 5}, {2, 4, 1, 1}, {});
    check_case(dtype, {2, 3, 1, 1}, {4, 3, 3, 3}, {2, 4, 1, 1}, {.padding = 1});
    check_case(dtype, {2, 1, 6, 6}, {1, 1, 3, 3}, {2, 1, 4, 4}, {});
    check_case(dtype, {2, 1, 6, 6}, {8, 1, 3, 3}, {2, 8, 4, 4}, {});
    check_case(dtype, {2, 8, 6, 6}, {1, 8, 3, 3}, {2, 1, 4, 4}, {});
    check_case(dtype, {2, 16, 6, 6}, {32, 16, 3, 3}, {2, 32, 4, 4}, {});
  }
}

TEST_CASE("groups keep channels apart, down to one channel each") {
  for (DType dtype : {DType::f32, DType::f64}) {
    check_case(dtype, {2, 4, 5, 5}, {6, 2, 3, 3}, {2, 6, 3, 3}, {.groups = 2});
    check_case(dtype, {2, 4, 5, 5}, {4, 1, 3, 3}, {2, 4, 5, 5}, {.padding = 1, .groups = 4});
    check_case(dtype, {2, 3, 5, 5}, {6, 1, 3, 3}, {2, 6, 3, 3}, {.groups = 3});
    check_case(dtype, {2, 16, 5, 5}, {16, 1, 3, 3}, {2, 16, 3, 3},
               {.stride = 2, .padding = 1, .groups = 16});
    check_case(dtype, {5, 4, 5, 5}, {6, 2, 3, 3}, {5, 6, 3, 3}, {.groups = 2}, false);
  }
}

TEST_CASE("batches of any size, with and without bias") {
  for (DType dtype : {DType::f32, DType::f64})
    for (int64_t n : {1, 3, 4, 5, 9, 17, 33})
      for (bool with_bias : {true, false})
        check_case(dtype, {n, 3, 5, 4}, {4, 3, 3, 3}, {n, 4, 3, 2}, {}, with_bias);
}

TEST_CASE("operands that are views are read as what they show") {
  const Tensor image = random_tensor({5, 4, 9, 8}, DType::f64, 5);
  const Tensor x = image.slice(0, {.start = 1})
                       .narrow(1, 1, 3)
                       .slice(2, {.start = 1, .step = 2})
                       .transpose(2, 3);
  const Tensor w = random_tensor({3, 5, 3, 2}, DType::f64, 6).transpose(0, 1),
               b = random_tensor({10}, DType::f64, 7).slice(0, {.step = 2});
  const Tensor dy = zeros({4, 5, 6, 3}, {.dtype = DType::f64});
  check_close("y", conv2d(x, w, b), reference(x, w, b, dy, {}).y, 1e-11);
  const Tensor repeated = random_tensor({1, 3, 6, 5}, DType::f64, 8).expand({4, 3, 6, 5});
  const Tensor dy2 = zeros({4, 5, 4, 4}, {.dtype = DType::f64});
  check_close("expanded", conv2d(repeated, w, b), reference(repeated, w, b, dy2, {}).y, 1e-11);
}

TEST_CASE("first and second derivatives, for every pair of inputs that wants them") {
  const Conv2dOptions all[] = {
      {}, {.stride = 2, .padding = 1}, {.padding = {0, 1}, .dilation = {1, 2}}, {.groups = 2}};
  for (const Conv2dOptions& o : all) {
    INFO(str_cat("stride ", o.stride.h, ", padding ", o.padding.w, ", dilation ", o.dilation.w,
                 ", groups ", o.groups));
    const auto f = [&](Inputs in) {
      return conv2d(in[0], in[1], in.size() > 2 ? in[2] : Tensor(), o);
    };
    const Tensor x = random_tensor({2, 2, 4, 5}, DType::f64, 9),
                 w = random_tensor({2, 2 / o.groups, 2, 3}, DType::f64, 10),
                 b = random_tensor({2}, DType::f64, 11);
    const auto grad = [](const Tensor& t) { return t.clone().requires_grad_(); };
    const auto squared = [&](Inputs in) {
      return square(f(in));
    };  // so that dy depends on the inputs as well
    CHECK_NOTHROW(autograd::gradcheck(f, {grad(x), grad(w), grad(b)}));
    CHECK_NOTHROW(autograd::gradgradcheck(f, {grad(x), grad(w), grad(b)}));
    CHECK_NOTHROW(autograd::gradgradcheck(squared, {grad(x), grad(w), grad(b)}));
    CHECK_NOTHROW(autograd::gradcheck(f, {x, grad(w), b}));
    CHECK_NOTHROW(autograd::gradcheck(f, {grad(x), w}));
    CHECK_NOTHROW(autograd::gradcheck(f, {x, w, grad(b)}));
    CHECK_NOTHROW(autograd::gradgradcheck(squared, {grad(x), w}));
    CHECK_NOTHROW(autograd::gradgradcheck(squared, {x, grad(w)}));
  }
}

TEST_CASE("f32 second derivatives agree with f64's") {
  const auto run = [](DType dtype) {
    const Tensor x = random_tensor({5, 3, 6, 5}, dtype, 12).requires_grad_(),
                 w = random_tensor({4, 3, 3, 3}, dtype, 13).requires_grad_();
    const Tensor y = conv2d(x, w, {}, {.padding = 1});
    const auto g = autograd::grad({square(y).sum()}, {x, w}, {}, {.create_graph = true});
    (square(g[0]).sum() + square(g[1]).sum() * 0.1).backward();
    return std::pair{x.grad(), w.grad()};
  };
  const auto single = run(DType::f32), exact = run(DType::f64);
  const auto near = [](const Tensor& got, const Tensor& want) {
    double largest = 0, difference = 0;
    const V a = got.to_vector<double>(), b = want.to_vector<double>();
    for (size_t i = 0; i < a.size(); ++i) {
      largest = std::max(largest, std::fabs(b[i]));
      difference = std::max(difference, std::fabs(a[i] - b[i]));
    }
    return difference < 1e-4 * largest;
  };
  CHECK(near(single.first, exact.first));
  CHECK(near(single.second, exact.second));
}

TEST_CASE("the bits of result and gradients do not depend on the number of threads") {
  const int before = get_num_threads();
  for (DType dtype : {DType::f32, DType::f64})
    for (int64_t n : {9, 16}) {
      const auto run = [&](int threads) {
        set_num_threads(threads);
        const Tensor x = random_tensor({n, 8, 9, 10}, dtype, 14).requires_grad_(),
                     w = random_tensor({16, 8, 3, 3}, dtype, 15).requires_grad_(),
                     b = random_tensor({16}, dtype, 16).requires_grad_();
        const Tensor y = conv2d(x, w, b, {.padding = 1});
        y.backward(random_tensor(y.shape(), dtype, 17));
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

TEST_CASE("conv2d of no images gives no images and gradients of 0, recorded ones too") {
  for (DType t : {DType::f32, DType::f64})
    for (int64_t groups : {1, 2})
      for (bool recorded : {false, true}) {
        const Tensor x = zeros({0, 2, 5, 6}, {.dtype = t}).requires_grad_(),
                     w = ones({4, 2 / groups, 3, 3}, {.dtype = t}).requires_grad_(),
                     b = ones({4}, {.dtype = t}).requires_grad_();
        const Tensor y = conv2d(x, w, b, {.stride = 2, .padding = 1, .groups = groups});
        CHECK(y.shape() == Shape{0, 4, 3, 3});
        const auto g = autograd::grad({y.sum()}, {x, w, b}, {}, {.create_graph = recorded});
        CHECK(g[0].shape() == x.shape());
        CHECK(g[1].shape() == w.shape());
        CHECK(g[1].to_vector<double>() == std::vector<double>(size_t(w.numel()), 0));
        CHECK(g[2].to_vector<double>() == std::vector<double>(4, 0));
        if (!recorded) continue;
        const Tensor second = autograd::grad({g[1].sum()}, {x}, {}, {.allow_unused = true})[0];
        if (second.defined()) CHECK(second.shape() == x.shape());
      }
}

TEST_CASE("conv2d with strides, padding and dilation of any size computes sizes without overflow") {
  const Tensor x = ones({1, 1, 3, 3}), w = ones({1, 1, 2, 2});
  const int64_t most = INT64_MAX;
  CHECK(conv2d(x, w, {}, {.stride = most}).to_vector<double>() == std::vector<double>{4});
  // Windows so far apart that all but one row and column are padding.
  const int64_t far = int64_t{1} << 40;
  const auto got = conv2d(x, w, {}, {.stride = far, .padding = far}).to_vector<double>();
  CHECK(got == std::vector<double>{0, 0, 0, 0, 4, 0, 0, 0, 0});
  for (const Conv2dOptions& o :
       {Conv2dOptions{.padding = most}, {.padding = most / 2 + 1}, {.padding = most / 2},
        {.padding = most, .dilation = most}, {.stride = most, .padding = most}})
    CHECK_THROWS_AS(conv2d(x, w, {}, o), ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, w, {}, {.dilation = most}),
                       Contains("larger than the padded input"), ShapeError);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.padding = int64_t{1} << 31}), Error);  // too large to hold
}

TEST_CASE("errors name the rule, the shapes and a remedy") {
  const Tensor x = zeros({2, 3, 5, 5}), w = zeros({4, 3, 3, 3});
  CHECK_THROWS_WITH_AS(conv2d(zeros({3, 5, 5}), w), Contains("unsqueeze(0)"), ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(zeros({3, 5, 5}), w), Contains("[3, 5, 5]"), ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, zeros({4, 3, 3})), Contains("[4, 3, 3]"), ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, zeros({4, 2, 3, 3})),
                       Contains("input has 3 channels but the weight [4, 2, 3, 3] expects 2"),
                       ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, w, {}, {.groups = 2}), Contains("groups"), ShapeError);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.groups = 0}), ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, w, zeros({3})), Contains("the bias must be [4], got [3]"),
                       ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, zeros({4, 3, 6, 3})), Contains("larger than the padded input"),
                       ShapeError);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.dilation = 3}), ShapeError);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.stride = 0}), ValueError);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.padding = -1}), ValueError);
  CHECK_THROWS_AS(conv2d(x, w, {}, {.dilation = {1, 0}}), ValueError);
  CHECK_THROWS_AS(conv2d(x, zeros({4, 3, 0, 3})), ShapeError);
  CHECK_THROWS_WITH_AS(conv2d(x, w.to(DType::f64)), Contains("f64"), DTypeError);
  CHECK_THROWS_WITH_AS(conv2d(x, w, zeros({4}, {.dtype = DType::f64})), Contains("conv2d: "),
                       DTypeError);
  CHECK_THROWS_AS(conv2d(x.to(DType::i64), w.to(DType::i64)), DTypeError);
}

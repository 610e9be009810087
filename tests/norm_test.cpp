// layer_norm and batch_norm against their definitions in double: layouts, running statistics,
// derivatives.
#include "op_check.h"

#include <limits>

#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/ops/layer_norm.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;
using namespace op_check;

namespace {

struct Moments {
  double mean = 0, variance = 0;  // biased
  int64_t n = 0;
};
Moments moments_of(const std::vector<double>& v) {
  Moments m{.n = static_cast<int64_t>(v.size())};
  for (double x : v) m.mean += x / double(m.n);
  for (double x : v) m.variance += (x - m.mean) * (x - m.mean) / double(m.n);
  return m;
}

std::vector<double> layer_norm_reference(const Tensor& x, int64_t n, const Tensor& w,
                                         const Tensor& b, double eps) {
  std::vector<double> y;
  const auto values = x.to_vector<double>();
  for (int64_t first = 0; first < x.numel(); first += n) {
    const auto m = moments_of({values.begin() + first, values.begin() + first + n});
    for (int64_t j = 0; j < n; ++j) {
      const double normal = (values[size_t(first + j)] - m.mean) / std::sqrt(m.variance + eps);
      y.push_back(normal * (w.defined() ? w.to_vector<double>()[size_t(j)] : 1) +
                  (b.defined() ? b.to_vector<double>()[size_t(j)] : 0));
    }
  }
  return y;
}

/// The channel of each element in row-major order.
int64_t channel_of(const Tensor& x, int64_t i) {
  return i / contiguous_strides(x.shape())[1] % x.size(1);
}
std::vector<Moments> channel_moments(const Tensor& x) {
  std::vector<std::vector<double>> by_channel(size_t(x.size(1)));
  const auto values = x.to_vector<double>();
  for (int64_t i = 0; i < x.numel(); ++i)
    by_channel[size_t(channel_of(x, i))].push_back(values[size_t(i)]);
  std::vector<Moments> all;
  for (const auto& v : by_channel) all.push_back(moments_of(v));
  return all;
}

}  // namespace

TEST_CASE("layer_norm agrees with its definition in every layout") {
  for (const auto& [shape, normalized] : std::vector<std::pair<Shape, Shape>>{{{7}, {7}},
                                                                              {{3, 10}, {10}},
                                                                              {{2, 3, 5}, {3, 5}},
                                                                              {{4, 129}, {129}},
                                                                              {{2, 5, 64}, {64}},
                                                                              {{6, 1}, {1}},
                                                                              {{0, 4}, {4}}})
    for (DType dtype : {DType::f32, DType::f64})
      for (const auto& [name, x] : layouts(shape, dtype))
        for (int parts = 0; parts < 4; ++parts) {
          const Tensor w = parts & 1 ? random_tensor(normalized, dtype, 2) : Tensor();
          const Tensor b = parts & 2 ? random_tensor(normalized, dtype, 3) : Tensor();
          const Tensor y = layer_norm(x, normalized, w, b, 1e-4);
          CHECK(y.shape() == shape);
          CHECK(y.dtype() == dtype);
          check_close(str_cat(shape, " ", dtype, " ", name, " ", parts), y,
                      layer_norm_reference(x, normalized.numel(), w, b, 1e-4),
                      dtype == DType::f32 ? 5e-6 : 1e-12);
        }
}

TEST_CASE("a large mean costs neither norm its accuracy") {
  const Tensor x = random_tensor({64, 100}, DType::f32) + 1000;
  check_close("layer_norm", layer_norm(x, {100}), layer_norm_reference(x, 100, {}, {}, 1e-5), 2e-4);
  const auto m = channel_moments(x);
  const auto values = x.to_vector<double>();
  std::vector<double> want;
  for (int64_t i = 0; i < x.numel(); ++i) {
    const Moments& c = m[size_t(channel_of(x, i))];
    want.push_back((values[size_t(i)] - c.mean) / std::sqrt(c.variance + 1e-5));
  }
  check_close("batch_norm", batch_norm(x, {}, {}, {}, {}, true), want, 2e-4);
}

TEST_CASE("batch_norm agrees with its definition: training, evaluation, running statistics") {
  for (const Shape& shape :
       {Shape{6, 5}, Shape{2, 3}, Shape{300, 70}, Shape{4, 3, 5, 6}, Shape{2, 17, 7, 3},
        Shape{3, 4, 10}, Shape{5000, 4}, Shape{9, 2, 100, 100}, Shape{2, 3, 1, 1}})
    for (DType dtype : {DType::f32, DType::f64})
      for (const auto& [name, x] : layouts(shape, dtype, 1, -1, 3)) {
        if (name == "expanded") continue;  // all samples equal: nothing to normalise
        const std::string what = str_cat(shape, " ", dtype, " ", name);
        const int64_t channels = shape[1];
        const double tolerance = dtype == DType::f32 ? 1e-5 : 1e-11, momentum = 0.3, eps = 1e-3;
        const Tensor w = random_tensor({channels}, dtype, 2),
                     b = random_tensor({channels}, dtype, 3);
        Tensor running_mean = random_tensor({channels}, dtype, 4),
               running_var = random_tensor({channels}, dtype, 5, 0.5, 2);
        const auto before_mean = running_mean.to_vector<double>(),
                   before_var = running_var.to_vector<double>();
        const auto m = channel_moments(x);
        const auto values = x.to_vector<double>(), ws = w.to_vector<double>(),
                   bs = b.to_vector<double>();
        std::vector<double> by_batch, by_running, want_mean, want_var;
        for (int64_t i = 0; i < x.numel(); ++i) {
          const size_t c = size_t(channel_of(x, i)), k = size_t(i);
          by_batch.push_back((values[k] - m[c].mean) / std::sqrt(m[c].variance + eps) * ws[c] +
                             bs[c]);
          by_running.push_back(
              (values[k] - before_mean[c]) / std::sqrt(before_var[c] + eps) * ws[c] + bs[c]);
        }
        for (size_t c = 0; c < m.size(); ++c) {
          const double unbiased = m[c].variance * double(m[c].n) / double(m[c].n - 1);
          want_mean.push_back((1 - momentum) * before_mean[c] + momentum * m[c].mean);
          want_var.push_back((1 - momentum) * before_var[c] + momentum * unbiased);
        }
        check_close("evaluation " + what,
                    batch_norm(x, running_mean, running_var, w, b, false, momentum, eps),
                    by_running, tolerance);
        CHECK(running_mean.to_vector<double>() == before_mean);
        const uint32_t version = running_mean.storage().version();
        const Tensor y = batch_norm(x, running_mean, running_var, w, b, true, momentum, eps);
        CHECK(running_mean.storage().version() > version);
        check_close("training " + what, y, by_batch, tolerance);
        check_close("running mean " + what, running_mean, want_mean, tolerance);
        check_close("running variance " + what, running_var, want_var, tolerance);
        CHECK(y.dtype() == dtype);
        if (name == "channels-last")
          CHECK(y.is_channels_last());
        else
          CHECK(y.is_contiguous());
      }
}

TEST_CASE(
    "without running statistics the batch's are used in evaluation too; weight and bias may be "
    "absent") {
  const Tensor x = random_tensor({5, 3});
  const auto trained = batch_norm(x, {}, {}, {}, {}, true).to_vector<double>();
  check_close("evaluation", batch_norm(x, {}, {}, {}, {}, false), trained, 0);
  check_close("ones and zeros",
              batch_norm(x, {}, {}, ones({3}, {.dtype = DType::f64}),
                         zeros({3}, {.dtype = DType::f64}), true),
              trained, 1e-15);
}

TEST_CASE("derivatives of layer_norm") {
  for (int parts = 0; parts < 4; ++parts) {
    std::vector<Tensor> inputs{random_tensor({3, 2, 4})};
    if (parts & 1) inputs.push_back(random_tensor({2, 4}, DType::f64, 2));
    if (parts & 2) inputs.push_back(random_tensor({2, 4}, DType::f64, 3));
    check_gradients(
        "layer_norm " + std::to_string(parts),
        [&](auto& x) {
          return layer_norm(x[0], {2, 4}, parts & 1 ? x[1] : Tensor(),
                            parts & 2 ? x.back() : Tensor());
        },
        inputs);
  }
  check_gradients("of a transposed", [](auto& x) { return layer_norm(x[0].t(), {3}, x[1]); },
                  {random_tensor({3, 4}), random_tensor({3}, DType::f64, 2)});
}

TEST_CASE("derivatives of batch_norm") {
  const std::vector<Tensor> parameters{random_tensor({3}, DType::f64, 2),
                                       random_tensor({3}, DType::f64, 3)};
  const Tensor mean = random_tensor({3}, DType::f64, 4),
               var = random_tensor({3}, DType::f64, 5, 0.5, 2);
  for (bool training : {true, false}) {
    const auto f = [&](const auto& x) {
      return batch_norm(x[0], mean.clone(), var.clone(), x[1], x[2], training);
    };
    const auto bare = [&](auto& x) {
      return batch_norm(x[0], mean.clone(), var.clone(), {}, {}, training);
    };
    const auto channels_last = [&](auto& x) {
      return batch_norm(x[0].permute({0, 3, 1, 2}), mean.clone(), var.clone(), x[1], x[2],
                        training);
    };
    const std::string what = training ? " training" : " evaluation";
    check_gradients("[N, C]" + what, f,
                    {random_tensor({4, 3}), parameters[0].clone(), parameters[1].clone()});
    check_gradients("[N, C] bare" + what, bare, {random_tensor({4, 3})}, training);
    check_gradients("[N, C, H, W]" + what, f,
                    {random_tensor({2, 3, 2, 2}), parameters[0].clone(), parameters[1].clone()});
    check_gradients("channels-last" + what, channels_last,
                    {random_tensor({2, 2, 2, 3}), parameters[0].clone(), parameters[1].clone()});
    check_gradients("transposed" + what,
                    [&](auto& x) {
                      return f(std::vector<Tensor>{x[0].t(), x[1], x[2]});
                    },
                    {random_tensor({3, 4}), parameters[0].clone(), parameters[1].clone()});
  }
}

TEST_CASE("on larger batches the fused gradients equal those made of ops") {
  auto check = [](const std::string& what, const Shape& shape, const Shape& parameters,
                  const Function& f) {
    std::vector<Tensor> x{random_tensor(shape), random_tensor(parameters, DType::f64, 2),
                          random_tensor(parameters, DType::f64, 3)};
    for (Tensor& t : x) t.requires_grad_();
    const Tensor w = random_tensor(f(x).shape(), DType::f64, 4);
    const auto fused = gradients(f, x, w, false), by_ops = gradients(f, x, w, true);
    for (size_t i = 0; i < 3; ++i)
      check_close(what + std::to_string(i), fused[i], by_ops[i].to_vector<double>(), 1e-10);
  };
  const auto batch = [](auto& x) { return batch_norm(x[0], {}, {}, x[1], x[2], true); };
  check("layer_norm", {1000, 40}, {40}, [](auto& x) { return layer_norm(x[0], {40}, x[1], x[2]); });
  check("batch_norm rows", {3000, 70}, {70}, batch);
  check("batch_norm planes", {3, 4, 100, 90}, {4}, batch);
  check("batch_norm channels-last", {3, 100, 90, 4}, {4}, [&](auto& x) {
    return batch_norm(x[0].permute({0, 3, 1, 2}), {}, {}, x[1], x[2], true);
  });
}

TEST_CASE("gradients in f32 agree with f64, and keep the memory order") {
  for (bool channels_last : {false, true}) {
    auto make = [&](DType dtype) {
      Tensor x = channels_last ? random_tensor({8, 9, 7, 20}, DType::f32).permute({0, 3, 1, 2})
                               : random_tensor({8, 20, 9, 7}, DType::f32);
      return x.to(dtype).requires_grad_();
    };
    const Tensor w = random_tensor({20}, DType::f32, 2), b = random_tensor({20}, DType::f32, 3);
    const Tensor dy = random_tensor({8, 20, 9, 7}, DType::f32, 4);
    std::vector<std::vector<Tensor>> results;
    for (DType dtype : {DType::f32, DType::f64}) {
      Tensor x = make(dtype), weight = w.to(dtype).clone().requires_grad_(),
             bias = b.to(dtype).clone().requires_grad_();
      const Tensor y = batch_norm(x, {}, {}, weight, bias, true);
      results.push_back(autograd::grad({y}, {x, weight, bias}, {dy.to(dtype)}));
      CHECK(results.back()[0].is_channels_last() == channels_last);
    }
    for (size_t i = 0; i < 3; ++i)
      check_close("gradient", results[0][i], results[1][i].to_vector<double>(), 2e-5);
  }
}

TEST_CASE("results do not depend on the number of threads") {
  const int before = get_num_threads();
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 5}) {
    set_num_threads(threads);
    std::vector<float> r;
    for (Tensor x :
         {random_tensor({3000, 50}, DType::f32), random_tensor({8, 20, 30, 30}, DType::f32),
          random_tensor({8, 30, 30, 20}, DType::f32).permute({0, 3, 1, 2})}) {
      x.requires_grad_();
      Tensor w = random_tensor({x.size(1)}, DType::f32, 2).requires_grad_();
      const Tensor y = batch_norm(x, {}, {}, w, {}, true);
      for (const Tensor& t :
           autograd::grad({square(y)}, {x, w}, {random_tensor(x.shape(), DType::f32, 3)}))
        for (float v : t.to_vector<float>()) r.push_back(v);
      if (x.dim() != 2) continue;
      const Tensor z = layer_norm(x, {x.size(1)}, w);
      for (const Tensor& t :
           autograd::grad({square(z)}, {x, w}, {random_tensor(x.shape(), DType::f32, 3)}))
        for (float v : t.to_vector<float>()) r.push_back(v);
    }
    results.push_back(r);
  }
  set_num_threads(before);
  CHECK(results[0] == results[1]);
  CHECK(results[0] == results[2]);
}

TEST_CASE("NaN in, NaN out, in its row or channel alone") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Tensor x = random_tensor({4, 3}, DType::f32);
  x[1].narrow(0, 2, 1).fill_(nan);
  const auto rows = layer_norm(x, {3}).to_vector<double>(),
             channels = batch_norm(x, {}, {}, {}, {}, true).to_vector<double>();
  for (size_t i = 0; i < 12; ++i) {
    CHECK(std::isnan(rows[i]) == (i / 3 == 1));
    CHECK(std::isnan(channels[i]) == (i % 3 == 2));
  }
}

TEST_CASE("batches without channels or samples, and rows without elements, have empty gradients") {
  for (const Shape& shape : {Shape{4, 0}, {0, 3}, {4, 0, 2, 2}, {0, 3, 2, 2}, {4, 3, 0}})
    for (bool training : {false, true})
      for (bool recorded : {false, true}) {
        CAPTURE(shape);
        const Tensor x = zeros(shape).requires_grad_(), w = ones({shape[1]}).requires_grad_();
        Tensor mean = zeros({shape[1]}), var = ones({shape[1]});
        const Tensor y = batch_norm(x, mean, var, w, {}, training);
        CHECK(y.shape() == shape);
        const auto g = autograd::grad({y}, {x, w}, {ones(shape)}, {.create_graph = recorded});
        CHECK(g[0].shape() == shape);
        CHECK(g[1].to_vector<double>() == std::vector<double>(size_t(shape[1]), 0));
        CHECK(var.to_vector<double>() == std::vector<double>(size_t(shape[1]), 1));
      }
  for (const Shape& shape : {Shape{3, 0}, {0, 4}})
    for (bool recorded : {false, true}) {
      const Tensor x = zeros(shape).requires_grad_(), w = ones({shape[1]}).requires_grad_();
      const Tensor y = layer_norm(x, {shape[1]}, w);
      const auto g = autograd::grad({y}, {x, w}, {ones(shape)}, {.create_graph = recorded});
      CHECK(g[0].shape() == shape);
      CHECK(g[1].to_vector<double>() == std::vector<double>(size_t(shape[1]), 0));
    }
}

TEST_CASE("errors") {
  const Tensor x = zeros({4, 3});
  CHECK_THROWS_WITH_AS(layer_norm(x, {4}), doctest::Contains("must be [4], got [4, 3]"),
                       ShapeError);
  CHECK_THROWS_AS(layer_norm(x, {}), ShapeError);
  CHECK_THROWS_WITH_AS(layer_norm(x, {3}, zeros({4})), doctest::Contains("have shape [3], got [4]"),
                       ShapeError);
  CHECK_THROWS_AS(layer_norm(x, {3}, zeros({3}, {.dtype = DType::f64})), DTypeError);
  CHECK_THROWS_AS(layer_norm(arange(0, 3), {3}), DTypeError);
  CHECK_THROWS_WITH_AS(batch_norm(zeros({1, 3}), {}, {}, {}, {}, true),
                       doctest::Contains("more than one value"), ShapeError);
  CHECK_THROWS_AS(batch_norm(zeros({1, 3, 1, 1}), {}, {}, {}, {}, true), ShapeError);
  CHECK_THROWS_WITH_AS(batch_norm(x, zeros({4}), ones({4})), doctest::Contains("3 channels"),
                       ShapeError);
  CHECK_THROWS_AS(batch_norm(zeros({3}), {}, {}, {}, {}, true), ShapeError);
  CHECK_THROWS_AS(batch_norm(x, zeros({3}), {}), ValueError);
  CHECK_THROWS_AS(batch_norm(x, {}, {}, ones({3}, {.dtype = DType::f64}), {}, true), DTypeError);
}

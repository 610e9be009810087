// Initialisation: bounds, moments, layers' defaults, and that the seed alone decides.
#include <doctest/doctest.h>

#include <set>

#include <lockstep/nn/nn.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

#include "golden.h"

using namespace lockstep;

namespace {

struct Moments {
  double mean = 0, std = 0, low = INFINITY, high = -INFINITY;
};
Moments moments(const Tensor& t) {
  Moments m;
  const auto values = t.to_vector<double>();
  const double n = static_cast<double>(values.size());
  for (double v : values) {
    m.mean += v / n;
    m.low = std::min(m.low, v);
    m.high = std::max(m.high, v);
  }
  for (double v : values) m.std += (v - m.mean) * (v - m.mean) / n;
  m.std = std::sqrt(m.std);
  return m;
}

/// Uniform within a bound: nearly reaches it, and has its standard deviation.
void check_uniform(const Tensor& t, double bound) {
  const Moments m = moments(t);
  CAPTURE(bound);
  CHECK(m.low >= -bound);
  CHECK(m.high <= bound);
  CHECK(m.low < -0.99 * bound);
  CHECK(m.high > 0.99 * bound);
  CHECK(m.std == doctest::Approx(bound / std::sqrt(3.0)).epsilon(0.03));
  CHECK(std::abs(m.mean) < 0.03 * bound);
}
void check_normal(const Tensor& t, double mean, double std) {
  const Moments m = moments(t);
  CHECK(std::abs(m.mean - mean) < 0.03 * std);
  CHECK(m.std == doctest::Approx(std).epsilon(0.03));
  CHECK(m.high > mean + 2.5 * std);
}

}  // namespace

TEST_CASE("fills and draws") {
  const Tensor t = empty({100, 200});
  check_uniform(nn::init::uniform_(t, -2, 2), 2);
  const Moments shifted = moments(nn::init::uniform_(t, 3, 4));
  CHECK(shifted.low >= 3);
  CHECK(shifted.high <= 4);
  check_normal(nn::init::normal_(t, 5, 0.5), 5, 0.5);
  CHECK(moments(nn::init::constant_(t, -1.5)).high == -1.5);
  CHECK(moments(nn::init::zeros_(t)).high == 0);
  CHECK(moments(nn::init::ones_(t)).low == 1);
  const Tensor doubles = empty({100, 200}, {.dtype = DType::f64});
  check_normal(nn::init::normal_(doubles), 0, 1);
  const Moments cut = moments(nn::init::trunc_normal_(doubles, 0.5, 1, -0.5, 1.5));
  CHECK(cut.low >= -0.5);
  CHECK(cut.high <= 1.5);
  CHECK(cut.mean == doctest::Approx(0.5).epsilon(0.03));
  CHECK(cut.std == doctest::Approx(0.5396).epsilon(0.03));  // of a standard normal cut at +-1
  CHECK_THROWS_AS(nn::init::uniform_(t, 1, 0), ValueError);
}

TEST_CASE("trunc_normal_: moments, between and in the tails, and bounds far out") {
  struct Cut {
    double low, high;
  };
  for (DType dtype : {DType::f32, DType::f64})
    for (const auto& [low, high] : {Cut{-2, 2}, {-1, 3}, {3, 4}, {-9, -8}, {10, INFINITY}}) {
      const auto& shown_low = low;  // clang 14 captures no structured binding
      CAPTURE(shown_low);
      const auto& shown_high = high;  // clang 14 captures no structured binding
      CAPTURE(shown_high);
      const double mean = 0.5, std = 2;
      const Tensor t = empty({100, 1000}, {.dtype = dtype});
      manual_seed(9);
      const Moments m = moments(nn::init::trunc_normal_(t, mean, std, mean + std * low, mean + std * high));
      // Of the standard normal distribution between the bounds, by Simpson's rule.
      const long double top = std::min(high, low + 5);
      long double mass = 0, first = 0, second = 0;
      constexpr int steps = 20000;
      for (int i = 0; i <= steps; ++i) {
        const long double x = low + (top - low) * i / steps;
        const long double w = (i == 0 || i == steps ? 1 : i % 2 ? 4 : 2) * std::exp(-x * x / 2 + low * low / 2.0L);
        mass += w;
        first += w * x;
        second += w * x * x;
      }
      const double want = static_cast<double>(first / mass),
                   spread = static_cast<double>(std::sqrt(second / mass - first / mass * first / mass));
      CHECK(m.low >= static_cast<float>(mean + std * low) - 1e-6);
      CHECK(m.high <= mean + std * high + 1e-6);
      CHECK(std::abs((m.mean - mean) / std - want) < 5 * spread / std::sqrt(1e5));
      CHECK(m.std / std == doctest::Approx(spread).epsilon(0.02));
    }
}

TEST_CASE("scaled draws") {
  const Tensor w = empty({64, 32, 3, 3});
  CHECK(nn::init::fans(w).in == 288);
  CHECK(nn::init::fans(w).out == 576);
  check_uniform(nn::init::kaiming_uniform_(w), std::sqrt(6.0 / 288));
  check_uniform(nn::init::kaiming_uniform_(w, {.a = std::sqrt(5.0)}), std::sqrt(1.0 / 288));
  check_normal(nn::init::kaiming_normal_(w, {.mode = nn::init::FanMode::out,
                                             .nonlinearity = nn::init::Nonlinearity::relu}),
               0, std::sqrt(2.0 / 576));
  check_uniform(nn::init::xavier_uniform_(w), std::sqrt(6.0 / (288 + 576)));
  check_normal(nn::init::xavier_normal_(w, 5.0 / 3), 0, 5.0 / 3 * std::sqrt(2.0 / (288 + 576)));
  CHECK_THROWS_AS(nn::init::kaiming_uniform_(empty({3})), ShapeError);
  CHECK(nn::init::calculate_gain(nn::init::Nonlinearity::leaky_relu, 2) ==
        doctest::Approx(std::sqrt(0.4)));
}

TEST_CASE("layers start as PyTorch's do") {
  const nn::Linear linear{100, 300};
  check_uniform(linear.weight, 0.1);
  CHECK(moments(linear.bias).high <= 0.1);
  CHECK(moments(linear.bias).high > 0.09);
  const nn::Conv2d conv{16, 64, 5, {.groups = 2}};
  check_uniform(conv.weight, std::sqrt(1.0 / (8 * 25)));
  CHECK(moments(conv.bias).high <= std::sqrt(1.0 / (8 * 25)));
  const nn::BatchNorm2d bn{5};
  CHECK(difference(bn.weight, ones({5})) == 0);
  CHECK(difference(bn.bias, zeros({5})) == 0);
  CHECK(difference(bn.running_var, ones({5})) == 0);
}

TEST_CASE("the seed alone decides") {
  auto make = [](int threads) {
    set_num_threads(threads);
    manual_seed(42);
    return nn::Sequential{nn::Linear{400, 300}, nn::Conv2d{3, 8, 3}};
  };
  const auto a = make(1).parameters(), b = make(3).parameters();
  for (size_t i = 0; i < a.size(); ++i) CHECK(difference(a[i], b[i]) == 0);
  CHECK(difference(a[0], nn::Linear{400, 300}.weight) > 0);
  manual_seed(43);
  CHECK(difference(a[0], nn::Linear{400, 300}.weight) > 0);
}

TEST_CASE("initialisation reaches strided tensors and leaves the graph alone") {
  const Tensor whole = zeros({40, 50}).requires_grad_();
  {
    const NoGradGuard guard;
    nn::init::ones_(whole.t().slice(0, {.step = 2}));
  }
  CHECK(moments(whole).mean == doctest::Approx(0.5));
  nn::init::normal_(whole);
  CHECK(whole.is_leaf());
  CHECK(whole.requires_grad());
}

TEST_CASE("draws for two-byte floats reach the many values that these have near 0") {
  const auto distinct = [](const Tensor& t) {
    const auto values = t.to_vector<double>();
    return std::set<double>(values.begin(), values.end()).size();
  };
  manual_seed(1);
  for (DType t : {DType::bf16, DType::f16}) {
    const Tensor x = zeros({100000}, {.dtype = t});
    CHECK(distinct(nn::init::uniform_(x, -0.05, 0.05)) > (t == DType::f16 ? 8000 : 2000));
    check_uniform(x.to(DType::f32), 0.05 * (1 + 0x1p-8));
    CHECK(distinct(nn::init::normal_(x, 0, 0.02)) > (t == DType::f16 ? 8000 : 2000));
  }
  CHECK_THROWS_AS(nn::init::uniform_(zeros({2}, {.dtype = DType::i64})), DTypeError);
  CHECK_THROWS_AS(nn::init::trunc_normal_(zeros({2}, {.dtype = DType::i64})), DTypeError);
}

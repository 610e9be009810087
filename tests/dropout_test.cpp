// dropout: how often it drops, that backward finds the same mask from the key alone, and that the
// mask depends on nothing but key and index.
#include <doctest/doctest.h>

#include <cmath>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/parallel.h>

using namespace lockstep;

TEST_CASE("elements are dropped with probability p, and the others scaled") {
  for (DType t : {DType::f32, DType::f64})
    for (double p : {0.1, 0.5, 0.9}) {
      Generator generator({.seed = 7});
      const int n = 200000;
      const std::vector<double> y =
          dropout(ones({n}, {.dtype = t}), p, true, generator).to_vector<double>();
      int dropped = 0, together = 0;
      bool scaled = true;
      for (size_t i = 0; i < y.size(); ++i) {
        dropped += y[i] == 0;
        together += i > 0 && y[i] == 0 && y[i - 1] == 0;
        scaled &= y[i] == 0 || std::fabs(y[i] * (1 - p) - 1) < 1e-6;
      }
      CHECK(scaled);
      const double sigma = std::sqrt(p * (1 - p) / n);
      CHECK(std::fabs(dropped / double(n) - p) < 5 * sigma);
      CHECK(std::fabs(together / double(n) - p * p) < 10 * sigma);  // neighbours are independent
    }
}

TEST_CASE("each element's number is the generator's, by its index") {
  Generator generator({.seed = 3, .offset = 5, .stream = 2});
  const RandomKey key = Generator(generator).next();
  const int n = 1037;
  const std::vector<double> y = dropout(ones({n}), 0.4, true, generator).to_vector<double>();
  for (int i = 0; i < n; ++i) {
    const float u =
        RandomKey::uniform(key.block(static_cast<uint64_t>(i) / 4)[static_cast<size_t>(i) % 4]);
    CHECK((y[static_cast<size_t>(i)] == 0) == (u < 0.4f));
  }
}

TEST_CASE("backward finds the same mask, once recorded too") {
  Tensor x = rand({1000}, {.dtype = DType::f64}).requires_grad_();
  const Tensor y = dropout(x, 0.3), dy = rand({1000}, {.dtype = DType::f64}).requires_grad_();
  const Tensor dx = autograd::grad({y}, {x}, {dy}, {.create_graph = true})[0];
  const auto xs = x.to_vector<double>(), ys = y.to_vector<double>(), dys = dy.to_vector<double>(),
             dxs = dx.to_vector<double>();
  for (size_t i = 0; i < xs.size(); ++i) CHECK(dxs[i] == doctest::Approx(ys[i] / xs[i] * dys[i]));
  const auto back = autograd::grad({dx}, {dy}, {x.detach()})[0].to_vector<double>();
  CHECK(back == ys);
}

TEST_CASE("the mask does not depend on memory order, threads or pieces") {
  auto mask = [](const Tensor& x) {
    Generator generator({.seed = 11});
    return dropout(x, 0.5, true, generator).to_vector<double>();
  };
  const Tensor plain = ones({3, 8, 61, 47});
  const std::vector<double> want = mask(plain);
  CHECK(mask(ones({3, 61, 47, 8}).permute({0, 3, 1, 2})) == want);
  CHECK(mask(ones({47, 61, 8, 3}).permute({3, 2, 1, 0})) == want);
  CHECK(mask(ones({1}).expand({3, 8, 61, 47})) == want);
  const int before = get_num_threads();
  set_num_threads(3);
  CHECK(mask(plain) == want);
  set_num_threads(1);
  CHECK(mask(plain) == want);
  set_num_threads(before);
}

TEST_CASE("draws differ, training off and p = 0 change nothing, p = 1 drops all") {
  Generator generator({.seed = 1});
  const Tensor x = ones({64});
  CHECK(dropout(x, 0.5, true, generator).to_vector<double>() !=
        dropout(x, 0.5, true, generator).to_vector<double>());
  CHECK(dropout(x, 0.5, false).is_same(x));
  CHECK(dropout(x, 0.0).is_same(x));
  CHECK(dropout(x, 1.0).to_vector<double>() == std::vector<double>(64, 0.0));
  CHECK_THROWS_AS(dropout(x, 1.5), ValueError);
  CHECK_THROWS_AS(dropout(x, std::nan("")), ValueError);
  CHECK_THROWS_AS(dropout(ones({3}, {.dtype = DType::i64})), DTypeError);
}

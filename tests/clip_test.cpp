// Gradient clipping against PyTorch, and at its edges.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include <lockstep/optim/clip.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

#include "golden.h"

using namespace lockstep;

namespace {

std::vector<Tensor> with_gradients(const Golden& golden, bool second) {
  std::vector<Tensor> params;
  for (int i = 0; i < 3; ++i) {
    params.push_back(golden["start." + std::to_string(i)].clone().requires_grad_());
    if (second || i != 1) params.back().set_grad(golden["grad.0." + std::to_string(i)].clone());
  }
  return params;
}

}  // namespace

TEST_CASE("norms and clipped gradients equal PyTorch's") {
  const Golden golden("optim.safetensors");
  for (const auto& [text, norm_type] :
       {std::pair{"2", 2.0}, {"1", 1.0}, {"3", 3.0}, {"inf", double(INFINITY)}})
    for (const auto& [limit, max_norm] : {std::pair{"1.5", 1.5}, {"10000", 1e4}}) {
      const std::string key = std::string("clip.") + text + "." + limit;
      CAPTURE(key);
      const auto params = with_gradients(golden, false);
      const double norm = optim::clip_grad_norm_(params, max_norm, {.norm_type = norm_type}).item<double>();
      CHECK(std::abs(norm - golden[key + ".norm"].item<double>()) < 1e-12 * norm);
      CHECK(difference(params[0].grad(), golden[key + ".0"]) < 1e-14);
      CHECK(difference(params[2].grad(), golden[key + ".2"]) < 1e-14);
      CHECK(!params[1].grad().defined());
    }
  const auto params = with_gradients(golden, true);
  optim::clip_grad_value_(params, 0.4);
  for (int i = 0; i < 3; ++i)
    CHECK(difference(params[static_cast<size_t>(i)].grad(),
                     golden["clip_value." + std::to_string(i)]) == 0);
}

TEST_CASE("f32, large and strided gradients; the norm does not depend on threads") {
  manual_seed(2);
  Tensor w = zeros({300, 301}).requires_grad_();
  const Tensor g = randn({301, 600}).t().slice(0, {.step = 2});  // gappy and transposed
  w.set_grad(g);
  double exact = 0;
  for (double v : g.to_vector<double>()) exact += v * v;
  exact = std::sqrt(exact);
  set_num_threads(2);
  const double two = optim::clip_grad_norm_({w}, 1e9).item<double>();
  set_num_threads(1);
  const double one = optim::clip_grad_norm_({w}, 1e9).item<double>();
  CHECK(one == two);
  CHECK(std::abs(one - exact) < 1e-6 * exact);
  optim::clip_grad_norm_({w}, 1);
  CHECK(std::abs(optim::clip_grad_norm_({w}, 1).item<double>() - 1) < 1e-5);
}

TEST_CASE("clip_grad_norm_: gradients of any magnitude keep their norm and direction") {
  struct Case {
    DType dtype;
    double size;
  };
  for (const auto& [dtype, size] : std::vector<Case>{{DType::f32, 3e19},
                                                     {DType::f32, 3e38},
                                                     {DType::f32, 1e-25},
                                                     {DType::f32, 1e-40},
                                                     {DType::f64, 1e300},
                                                     {DType::f64, 1e308},
                                                     {DType::f64, 1e-200},
                                                     {DType::f64, 1e-310}})
    for (double norm_type : {1.0, 2.0, 3.0, 0.5, double(INFINITY)})
      for (bool gappy : {false, true}) {
        const auto& shown_dtype = dtype;  // clang 14 captures no structured binding
        CAPTURE(shown_dtype);
        const auto& shown_size = size;  // clang 14 captures no structured binding
        CAPTURE(shown_size);
        CAPTURE(norm_type);
        constexpr int64_t n = 64;
        const double max_norm = std::min(size, 1.0);
        Tensor p = zeros({n}, {.dtype = dtype}).requires_grad_();
        const Tensor g = full({2 * n}, size, {.dtype = dtype});
        p.set_grad(gappy ? g.slice(0, {.step = 2}) : g.narrow(0, 0, n));
        const double given = p.grad()[0].item<double>();  // size, rounded
        const double want = given * (std::isinf(norm_type) ? 1 : std::pow(n, 1 / norm_type));
        const double norm = optim::clip_grad_norm_({p}, max_norm, {.norm_type = norm_type}).item<double>();
        CHECK((std::isinf(want) || std::abs(norm / want - 1) < 1e-6));
        // The same direction: divided by the norm, to which 1e-6 is added.
        const auto exact = static_cast<long double>(given) *
                           (std::isinf(norm_type) ? 1 : std::pow(static_cast<long double>(n), 1 / norm_type));
        const auto factor = static_cast<double>(std::min(1.0L, max_norm / (exact + 1e-6L)));
        const double least = dtype == DType::f32
                                 ? static_cast<double>(std::numeric_limits<float>::denorm_min())
                                 : std::numeric_limits<double>::denorm_min();
        const double clipped = p.grad()[n - 1].item<double>();
        CHECK(std::abs(clipped - given * factor) <= 1e-5 * given * factor + least);
      }
}

TEST_CASE("no gradients, and norms that are not finite") {
  Tensor w = zeros({2}).requires_grad_();
  CHECK(optim::clip_grad_norm_({w}, 1).item<double>() == 0);
  CHECK(optim::clip_grad_norm_({}, 1).item<double>() == 0);
  for (const double bad : {double(NAN), double(INFINITY)})
    for (const double norm_type : {2.0, 1.0, 3.0, double(INFINITY)}) {
      w.set_grad(tensor<float>({1, static_cast<float>(bad)}));
      CHECK_THROWS_AS(
          optim::clip_grad_norm_({w}, 1, {.norm_type = norm_type, .error_if_nonfinite = true}),
          ValueError);
      CHECK(w.grad()[0].item<float>() == 1);
      const double norm =
          optim::clip_grad_norm_({w}, 1, {.norm_type = norm_type}).item<double>();
      CHECK(std::isnan(norm) == std::isnan(bad));
      CHECK(!std::isfinite(norm));
    }
  CHECK_THROWS_AS(optim::clip_grad_norm_({w}, -1), ValueError);
  CHECK_THROWS_AS(optim::clip_grad_norm_({w}, 1, {.norm_type = 0}), ValueError);
  CHECK_THROWS_AS(optim::clip_grad_value_({w}, -1), ValueError);
}

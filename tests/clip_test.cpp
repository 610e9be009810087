// Gradient clipping against PyTorch, and at its edges.
#include <doctest/doctest.h>

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
      const double norm = optim::clip_grad_norm_(params, max_norm, {.norm_type = norm_type});
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
  const double two = optim::clip_grad_norm_({w}, 1e9);
  set_num_threads(1);
  const double one = optim::clip_grad_norm_({w}, 1e9);
  CHECK(one == two);
  CHECK(std::abs(one - exact) < 1e-6 * exact);
  optim::clip_grad_norm_({w}, 1);
  CHECK(std::abs(optim::clip_grad_norm_({w}, 1) - 1) < 1e-5);
}

TEST_CASE("no gradients, and norms that are not finite") {
  Tensor w = zeros({2}).requires_grad_();
  CHECK(optim::clip_grad_norm_({w}, 1) == 0);
  CHECK(optim::clip_grad_norm_({}, 1) == 0);
  for (const double bad : {double(NAN), double(INFINITY)})
    for (const double norm_type : {2.0, 1.0, 3.0, double(INFINITY)}) {
      w.set_grad(tensor<float>({1, static_cast<float>(bad)}));
      CHECK_THROWS_AS(
          optim::clip_grad_norm_({w}, 1, {.norm_type = norm_type, .error_if_nonfinite = true}),
          ValueError);
      CHECK(w.grad()[0].item<float>() == 1);
      const double norm = optim::clip_grad_norm_({w}, 1, {.norm_type = norm_type});
      CHECK(std::isnan(norm) == std::isnan(bad));
      CHECK(!std::isfinite(norm));
    }
  CHECK_THROWS_AS(optim::clip_grad_norm_({w}, -1), ValueError);
  CHECK_THROWS_AS(optim::clip_grad_norm_({w}, 1, {.norm_type = 0}), ValueError);
  CHECK_THROWS_AS(optim::clip_grad_value_({w}, -1), ValueError);
}

// Functions with infinite slopes on a branch that is not taken: with an argument that is safe there,
// as elementwise.h advises, the gradient is right, plain and recorded; and maximum with a floor is.
#include <doctest/doctest.h>

#include <functional>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/ops.h>

using namespace lockstep;

TEST_CASE("where: with a safe argument the branch not taken adds nothing to the gradient") {
  struct Case {
    const char* name;
    std::function<Tensor(const Tensor&)> f;
    double slope;  // at 4
  };
  const Case all[] = {
      {"sqrt", [](const Tensor& x) { return sqrt(x); }, 0.25},
      {"log", [](const Tensor& x) { return log(x); }, 0.25},
      {"1 / x", [](const Tensor& x) { return 1 / x; }, -1.0 / 16},
      {"pow", [](const Tensor& x) { return pow(x, -0.5); }, -1.0 / 16},
  };
  for (const Case& c : all)
    for (DType t : {DType::f32, DType::f64})
      for (bool create_graph : {false, true}) {
        CAPTURE(c.name);
        const Tensor x = tensor<double>({0, 4, 0}, {3}, {.dtype = t}).requires_grad_();
        const Tensor positive = gt(x, 0);
        const Tensor y = where(positive, c.f(where(positive, x, 1)), 0);
        const Tensor g = autograd::grad({y.sum()}, {x}, {}, {.create_graph = create_graph})[0];
        CHECK(g.to_vector<double>() == std::vector<double>{0, c.slope, 0});
      }
}

TEST_CASE("maximum: a floor under the argument of sqrt makes the gradient 0 where it holds") {
  for (bool create_graph : {false, true}) {
    const Tensor x = zeros({2}).requires_grad_(), y = zeros({2}).requires_grad_();
    const Tensor r = sqrt(maximum(x * x + y * y, 1e-20));
    for (const Tensor& g : autograd::grad({r.sum()}, {x, y}, {}, {.create_graph = create_graph}))
      CHECK(g.to_vector<double>() == std::vector<double>{0, 0});
  }
}

// gradcheck: compares the derivatives that backward computes with finite differences, for tests of
// ops.
//
//   autograd::gradcheck([](const std::vector<Tensor>& in) { return my_op(in[0], in[1]); }, {x, w});
#pragma once

#include <functional>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::autograd {

struct GradcheckOptions {
  double step = 1e-6;  // h in (f(x + h) - f(x - h)) / 2h
  double atol = 1e-5;  // |analytic - numeric| <= atol + rtol * |numeric|
  double rtol = 1e-3;
};

using Differentiable = std::function<Tensor(const std::vector<Tensor>&)>;

/// Checks d(sum of v * f(inputs)) for a fixed random v by every element of every input that
/// requires grad. The inputs must be f64, and f the same function each time. Throws AutogradError
/// that names the input, the element and both values.
LOCKSTEP_API void gradcheck(const Differentiable& f, const std::vector<Tensor>& inputs,
                            GradcheckOptions options = {});

/// The same for the gradient of f that create_graph records, and for its own gradient: second
/// derivatives.
LOCKSTEP_API void gradgradcheck(const Differentiable& f, const std::vector<Tensor>& inputs,
                                GradcheckOptions options = {});

}  // namespace lockstep::autograd

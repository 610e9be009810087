// grad(): derivatives of outputs by chosen inputs, returned instead of accumulated in leaves. No
// leaf changes, and no hook that follows accumulation runs.
//
//   Tensor dx = autograd::grad({loss}, {x}, {}, {.create_graph = true})[0];  // dx.backward() works
#pragma once

#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::autograd {

struct GradOptions {
  bool retain_graph = false;
  bool create_graph = false;  // record the backward itself; implies retain_graph
  /// An input that no output depends on gets an undefined tensor instead of an error.
  bool allow_unused = false;
};

/// The gradients of sum_k <grad_outputs[k], outputs[k]> by each input. A grad_outputs that is empty
/// or undefined stands for 1, and needs an output of one element.
LOCKSTEP_API std::vector<Tensor> grad(const std::vector<Tensor>& outputs,
                                      const std::vector<Tensor>& inputs,
                                      const std::vector<Tensor>& grad_outputs = {},
                                      GradOptions options = {});

}  // namespace lockstep::autograd

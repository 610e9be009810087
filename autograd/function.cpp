#include <lockstep/autograd/function.h>

#include <algorithm>

#include <lockstep/tensor/ops/reduce.h>

namespace lockstep::autograd {

variable_list AutogradContext::get_saved_variables() const {
  LOCKSTEP_CHECK(saved_, AutogradError,
                 "get_saved_variables: forward has nothing saved yet; call it in backward");
  variable_list tensors;
  for (int i = 0; i < saved_->kept_count(); ++i) tensors.push_back(saved_->kept(i));
  return tensors;
}

bool AutogradContext::needs_input_grad(size_t i) const {
  LOCKSTEP_CHECK(i < state_.inputs.size(), IndexError, "needs_input_grad: forward has ",
                 state_.inputs.size(), " arguments, and none as number ", i);
  const int input = state_.inputs[i];
  if (input < 0) return false;
  if (dx_) return dx_->needed(input);
  const Tensor& x = inputs_[static_cast<size_t>(input)];
  return x.defined() && x.requires_grad();
}

void AutogradContext::end_forward(const char* name, Saver& saver, std::span<const Tensor> outputs) {
  const auto number_in = [](std::span<const Tensor> list, const Tensor& t) {
    const auto at =
        std::find_if(list.begin(), list.end(), [&](const Tensor& x) { return x.is_same(t); });
    return at == list.end() ? -1 : static_cast<int>(at - list.begin());
  };
  for (size_t i = 0; i < to_save_.size(); ++i) {
    const Tensor& t = to_save_[i];
    const int output = t.defined() && number_in(inputs_, t) < 0 ? number_in(outputs, t) : -1;
    if (output >= 0)
      saver.keep_output(static_cast<int>(i), t, output);
    else
      saver.keep_connected(static_cast<int>(i), t);
  }
  for (const Tensor& t : constants_) {
    const int output = number_in(outputs, t);
    LOCKSTEP_CHECK(output >= 0, ValueError, name,
                   ": mark_non_differentiable names a tensor that its forward does not return");
    saver.mark_non_differentiable(output);
  }
}

variable_list AutogradContext::gradients(std::span<const Tensor> dys) const {
  variable_list all(dys.begin(), dys.end());
  if (state_.materialize)
    for (size_t i = 0; i < all.size(); ++i)
      if (!all[i].defined()) all[i] = saved_->node().output(static_cast<int>(i)).zeros();
  return all;
}

void AutogradContext::end_backward(const char* name, const variable_list& gradients,
                                   InputGradients& dx) const {
  LOCKSTEP_CHECK(gradients.size() == state_.inputs.size(), AutogradError, "backward of ", name,
                 ": it returned ", gradients.size(), " gradients, and its forward has ",
                 state_.inputs.size(),
                 " arguments; return an undefined Tensor for those that have none");
  for (size_t i = 0; i < gradients.size(); ++i) {
    Tensor g = gradients[i];
    const int input = state_.inputs[i];
    LOCKSTEP_CHECK(input >= 0 || !g.defined(), AutogradError, "backward of ", name,
                   ": it returned a gradient for argument ", i,
                   ", which is no tensor; return an undefined Tensor");
    if (input < 0 || !dx.needed(input)) continue;
    if (!g.defined()) {
      dx.none(input);
      continue;
    }
    const Edge& edge = saved_->node().inputs[static_cast<size_t>(input)];
    const Node::Output& wanted = edge.node->output(edge.output);
    if (g.shape() != wanted.shape) g = sum_to(g, wanted.shape);
    dx.set(input, g.to(wanted.dtype));
  }
}

}  // namespace lockstep::autograd

// Function: a differentiable function of a program, with PyTorch's spelling: static forward and
// backward, and a context that carries what one keeps for the other. It is an op like all others.
//
//   struct Scale : autograd::Function<Scale> {
//     static Tensor forward(autograd::AutogradContext* ctx, const Tensor& x, double factor) {
//       ctx->saved_data["factor"] = factor;
//       return x * factor;
//     }
//     static autograd::variable_list backward(autograd::AutogradContext* ctx,
//                                             autograd::variable_list grads) {
//       return {grads[0] * std::any_cast<double>(ctx->saved_data["factor"]), Tensor()};
//     }
//   };
//   Tensor y = Scale::apply(x, 3.0);
#pragma once

#include <any>
#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/tensor/op.h>

namespace lockstep::autograd {

using variable_list = std::vector<Tensor>;

namespace detail {
/// What a Function's node holds beside saved tensors.
struct FunctionState {
  std::map<std::string, std::any> saved_data;
  std::vector<int> inputs;  // by argument of forward: its number among the tensors, or -1
  bool materialize = true;
};
template <class F, class Args>
struct FunctionOp;
}  // namespace detail

/// What forward and backward of a Function share. It lives as long as the call that it is given to.
class LOCKSTEP_API AutogradContext {
 public:
  AutogradContext(const AutogradContext&) = delete;

  /// Values of any type, for backward: ctx->saved_data["k"] = 3; std::any_cast<int>(saved_data["k"]).
  /// Tensors go through save_for_backward.
  std::map<std::string, std::any>& saved_data;

  /// In forward: inputs, outputs or other tensors for backward, checked for changes in place, and
  /// connected to the graph for second derivatives where they are inputs or outputs. Replaces what an
  /// earlier call saved.
  void save_for_backward(variable_list tensors) { to_save_ = std::move(tensors); }
  /// In backward: what was saved, in that order. AutogradError: an earlier backward freed it, or it was
  /// changed in place.
  variable_list get_saved_variables() const;
  /// In forward: these of its outputs have no gradient.
  void mark_non_differentiable(variable_list outputs) { constants_ = std::move(outputs); }
  /// In forward: whether backward gets zeros, the default, or undefined tensors for outputs that
  /// received no gradient.
  void set_materialize_grads(bool value) { state_.materialize = value; }
  /// Whether argument i of forward, counted from 0 behind the context, is a tensor whose gradient is
  /// wanted. Each tensor of a list counts as an argument.
  bool needs_input_grad(size_t i) const;

 private:
  template <class F, class Args>
  friend struct detail::FunctionOp;
  AutogradContext(detail::FunctionState& state, std::span<const Tensor> inputs)
      : saved_data(state.saved_data), state_(state), inputs_(inputs) {}
  AutogradContext(detail::FunctionState& state, const Saved& saved, const InputGradients& dx)
      : saved_data(state.saved_data), state_(state), saved_(&saved), dx_(&dx) {}

  void end_forward(const char* name, Saver& saver, std::span<const Tensor> outputs);
  variable_list gradients(std::span<const Tensor> dys) const;
  void end_backward(const char* name, const variable_list& gradients, InputGradients& dx) const;

  detail::FunctionState& state_;
  std::span<const Tensor> inputs_;  // in forward
  variable_list to_save_, constants_;
  const Saved* saved_ = nullptr;  // in backward
  const InputGradients* dx_ = nullptr;
};

namespace detail {

template <class F>
constexpr std::string_view class_name() {
  std::string_view text = __PRETTY_FUNCTION__;
  text.remove_prefix(text.find("F = ") + 4);
  text = text.substr(0, text.find_first_of(";]"));
  const size_t scope = text.substr(0, text.find('<')).rfind("::");
  return scope == text.npos ? text : text.substr(scope + 2);
}
/// The same with a zero at the end.
template <class F>
inline constexpr auto class_name_text = [] {
  std::array<char, class_name<F>().size() + 1> text{};
  class_name<F>().copy(text.data(), text.size() - 1);
  return text;
}();

/// A Function as an op over the list of its tensors.
template <class F, class Args>
struct FunctionOp {
  static constexpr const char* name = [] {
    if constexpr (requires { F::name; })
      return F::name;
    else
      return class_name_text<F>.data();
  }();
  static constexpr Precision precision = [] {
    if constexpr (requires { F::precision; })
      return F::precision;
    else
      return Precision::given;
  }();
  static constexpr unsigned saves = 0;
  Args* args;  // of the call; null after forward
  std::unique_ptr<FunctionState> state;

  auto forward(Saver& saver, std::span<const Tensor> inputs) {
    AutogradContext ctx(*state, inputs);
    auto result =
        std::apply([&](auto&&... a) { return F::forward(&ctx, std::forward<decltype(a)>(a)...); },
                   std::move(*std::exchange(args, nullptr)));
    using R = lockstep::detail::Results<decltype(result)>;
    auto outputs = R::open(std::move(result));
    ctx.end_forward(name, saver, outputs);
    return R::close(std::move(outputs));
  }
  void backward(const Saved& saved, std::span<const Tensor> dys, InputGradients& dx) {
    AutogradContext ctx(*state, saved, dx);
    ctx.end_backward(name, F::backward(&ctx, ctx.gradients(dys)), dx);
  }
};

inline void collect(const Tensor& x, variable_list& tensors, FunctionState& state) {
  state.inputs.push_back(static_cast<int>(tensors.size()));
  tensors.push_back(x);
}
inline void collect(const variable_list& list, variable_list& tensors, FunctionState& state) {
  for (const Tensor& x : list) collect(x, tensors, state);
}
template <class T>
void collect(const T&, variable_list&, FunctionState& state) {
  state.inputs.push_back(-1);
}

}  // namespace detail

/// Base of a differentiable function F, which defines
///
///   static R forward(AutogradContext* ctx, args...);    // R: Tensor, variable_list, array or tuple
///   static variable_list backward(AutogradContext* ctx, variable_list grads);
///
/// forward runs without grad mode; tensors and lists of tensors (variable_list) among its arguments
/// are the inputs. backward gets a gradient for each output, zeros where none arrived, and returns one
/// for each argument of forward, of each list one for each tensor: undefined where it is zero or the
/// argument is no tensor. A gradient is summed to its input's shape, and converted to its dtype, where
/// these differ, as broadcasting would have it. Made of ops, backward can be differentiated.
///
/// A Function must not change its inputs; for ops in place see apply_in_place(). Its name in errors is
/// the class's, or F::name.
template <class F>
struct Function {
  template <class... Args>
  static auto apply(Args&&... args) {
    using Tuple = std::tuple<Args&&...>;
    Tuple all(std::forward<Args>(args)...);
    auto state = std::make_unique<detail::FunctionState>();
    variable_list tensors;
    std::apply([&](const auto&... a) { (detail::collect(a, tensors, *state), ...); }, all);
    return apply_list(detail::FunctionOp<F, Tuple>{&all, std::move(state)}, tensors);
  }
};

}  // namespace lockstep::autograd

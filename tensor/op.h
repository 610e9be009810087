// apply(op, inputs...): the one door that every op goes through. An op is a struct: its fields are
// its parameters, forward computes, and backward, right below it, differentiates.
//
//   struct Softmax {
//     static constexpr const char* name = "softmax";
//     static constexpr unsigned saves = kOutput;        // what backward reads: kInput(i) |
//     kOutput; may be a field int64_t dim; Tensor forward(const Tensor& x);                  //
//     runs without grad mode; may fill further fields void backward(const Saved& saved, const
//     Tensor& dy, InputGradients& dx) const;
//   };
//   Tensor softmax(const Tensor& x, int64_t dim) { return apply(Softmax{dim}, x); }
//
// A user's own op is made the same way. backward written in terms of ops is differentiable itself;
// one that calls kernels must leave them when is_grad_enabled().
#pragma once

#include <array>
#include <string>
#include <utility>

#include <lockstep/tensor/node.h>

namespace lockstep {

constexpr unsigned kInput(int i) { return 1u << i; }
inline constexpr unsigned kOutput = 1u << 31;

/// A tensor kept for backward, with the version of its bytes at that moment.
class LOCKSTEP_API SavedTensor {
 public:
  SavedTensor() = default;
  explicit SavedTensor(const Tensor& t)
      : tensor_(t), version_(t.defined() ? t.storage().version() : 0) {}
  /// Throws AutogradError when an in-place op has changed the bytes since.
  const Tensor& unpack(const char* op) const;
  void reset() { tensor_ = Tensor(); }

 private:
  Tensor tensor_;
  uint32_t version_ = 0;
};

/// What an op's backward may read: the inputs and the output that `saves` names.
class LOCKSTEP_API Saved {
 public:
  Saved(const Node& node, std::span<const SavedTensor> inputs, const SavedTensor& output,
        bool released)
      : node_(node), inputs_(inputs), output_(output), released_(released) {}
  const Tensor& input(int i) const {
    check_alive();
    return inputs_[static_cast<size_t>(i)].unpack(node_.name());
  }
  /// The node's own tensor, connected to the graph again when a differentiable backward is
  /// recorded.
  Tensor output() const;

 private:
  void check_alive() const;
  const Node& node_;
  std::span<const SavedTensor> inputs_;
  const SavedTensor& output_;
  bool released_;
};

/// The node of an op with N inputs.
template <class Op, int N>
class OpNode final : public Node {
 public:
  OpNode(Op op, const std::array<const Tensor*, N>& inputs, const Tensor& y) : op_(std::move(op)) {
    this->inputs.resize(N);
    for (int i = 0; i < N; ++i) {
      if (!inputs[i]->defined()) continue;
      if (op_.saves & kInput(i)) saved_[i] = SavedTensor(*inputs[i]);
      this->inputs[i] = inputs[i]->node();
    }
    if (op_.saves & kOutput) output_ = SavedTensor(y.detach());
  }
  const char* name() const override { return Op::name; }
  void backward(const Tensor& dy, InputGradients& dx) override {
    op_.backward(Saved(*this, saved_, output_, released_), dy, dx);
  }
  void release_saved() override {
    for (SavedTensor& s : saved_) s.reset();
    output_.reset();
    released_ = op_.saves != 0;
  }

 private:
  Op op_;
  std::array<SavedTensor, N> saved_;
  SavedTensor output_;
  bool released_ = false;
};

/// Sees every op of its thread before it runs, and may replace inputs: autocast, profiling, anomaly
/// mode.
class LOCKSTEP_API OpInterceptor {
 public:
  virtual ~OpInterceptor() = default;
  virtual void before(const char* op, std::span<Tensor> inputs) = 0;
};
/// Installs an interceptor for this thread and returns the one before; null for none.
LOCKSTEP_API OpInterceptor* set_op_interceptor(OpInterceptor* interceptor) noexcept;

/// The names of all ops of the library and of the user's own that are loaded, sorted: what a test
/// that claims to cover every op compares itself with.
LOCKSTEP_API std::vector<std::string> op_names();

namespace detail {
LOCKSTEP_API bool register_op(const char* name);
/// Registers Op when the binary that applies it is loaded.
template <class Op>
inline const bool registered = register_op(Op::name);

LOCKSTEP_API OpInterceptor* op_interceptor() noexcept;
LOCKSTEP_API void attach(const Tensor& y, Ref<Node> node);

template <class Op, class... Inputs>
Tensor apply(Op op, const Inputs&... inputs) {
  Tensor y;
  const bool record = is_grad_enabled() && ((inputs.defined() && inputs.node()) || ...);
  if (record) {
    NoGradGuard guard;
    y = op.forward(inputs...);
    if (!is_floating(y.dtype())) return y;
    attach(y, make_ref<OpNode<Op, sizeof...(Inputs)>>(
                  std::move(op), std::array<const Tensor*, sizeof...(Inputs)>{&inputs...}, y));
    return y;
  }
  NoGradGuard guard;
  return op.forward(inputs...);
}
}  // namespace detail

/// Runs op.forward on the inputs (an undefined Tensor is an absent one) and, when grad mode is on
/// and an input requires grad, puts the op's node behind the result.
template <class Op, class... Inputs>
Tensor apply(Op op, const Inputs&... inputs) {
  static_cast<void>(detail::registered<Op>);
  if (OpInterceptor* interceptor = detail::op_interceptor()) [[unlikely]] {
    std::array<Tensor, sizeof...(Inputs)> replaced{inputs...};
    interceptor->before(Op::name, replaced);
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return detail::apply(std::move(op), replaced[I]...);
    }
    (std::index_sequence_for<Inputs...>());
  }
  return detail::apply(std::move(op), inputs...);
}

/// An op over a list of tensors of any length (cat, stack): forward takes the span; saves nothing.
template <class Op>
class ListNode final : public Node {
 public:
  ListNode(Op op, std::span<const Tensor> inputs) : op_(std::move(op)) {
    for (const Tensor& x : inputs) this->inputs.push_back(x.node());
  }
  const char* name() const override { return Op::name; }
  void backward(const Tensor& dy, InputGradients& dx) override { op_.backward(dy, dx); }

 private:
  Op op_;
};
template <class Op>
Tensor apply_list(Op op, std::vector<Tensor> inputs) {
  static_cast<void>(detail::registered<Op>);
  if (OpInterceptor* interceptor = detail::op_interceptor()) interceptor->before(Op::name, inputs);
  bool record = false;
  for (const Tensor& x : inputs) record |= x.node().get() != nullptr;
  Tensor y;
  {
    NoGradGuard guard;
    y = op.forward(inputs);
  }
  if (record && is_grad_enabled()) detail::attach(y, make_ref<ListNode<Op>>(std::move(op), inputs));
  return y;
}

}  // namespace lockstep

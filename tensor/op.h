// Entry point through which every differentiable op is executed and recorded: apply() for ops that
// make a new tensor, apply_in_place() for those that write to one. An op is a struct: its fields
// are its parameters, forward computes, and backward, right below it, differentiates.
//
//   struct Softmax {
//     static constexpr const char* name = "softmax";
//     static constexpr unsigned saves = kOutput;  // what backward reads: kInput(i) | kOutput
//     int64_t dim;
//     Tensor forward(const Tensor& x);            // grad mode is off
//     void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const;
//   };
//   Tensor softmax(const Tensor& x, int64_t dim) { return apply(Softmax{dim}, x); }
//
// A forward that takes a Saver& before its inputs may keep further tensors (statistics, indices). An
// op of several inputs may define saves_for(i), what the derivative by input i reads, instead of
// `saves`: then nothing is saved for the derivative by an input that requires no grad. A user's own
// op is made the same way. A backward written in terms of ops is differentiable itself;
// one that calls kernels must use ops instead when is_grad_enabled().
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/op_hook.h>

namespace lockstep {

constexpr unsigned kInput(int i) { return 1u << i; }
inline constexpr unsigned kOutput = 1u << 31;

/// A tensor saved for backward, with the version of its storage at that moment. It refers to the
/// storage and the graph, not to the handle it was made from, so that it is in no reference cycle.
class LOCKSTEP_API SavedTensor {
 public:
  SavedTensor() = default;
  /// `node` is where the tensor comes from; null for a constant.
  SavedTensor(const Tensor& t, Ref<Node> node);
  /// The tensor, part of the graph if grad mode is on. Throws AutogradError when an in-place op has
  /// changed the storage since.
  Tensor unpack(const char* op) const;
  void reset() { *this = SavedTensor(); }

 private:
  Tensor tensor_;
  Ref<Node> node_;
  uint32_t version_ = 0;
};

/// Given to an op's forward: saves tensors for backward beside the inputs and the output that
/// `saves` names. Does nothing when no graph is recorded.
class LOCKSTEP_API Saver {
 public:
  explicit Saver(bool records) : records_(records) {}
  /// Saves t, a constant to the derivative, as number i, counted from 0.
  void keep(int i, const Tensor& t);
  std::vector<SavedTensor> take() { return std::move(kept_); }

 private:
  bool records_;
  std::vector<SavedTensor> kept_;
};

/// What an op's backward may read: the inputs and the output that `saves` names, and what its
/// forward kept.
class LOCKSTEP_API Saved {
 public:
  Saved(const Node& node, unsigned saves, std::span<const SavedTensor> inputs,
        const SavedTensor& output, std::span<const SavedTensor> kept, bool released)
      : node_(node),
        saves_(saves),
        inputs_(inputs),
        output_(output),
        kept_(kept),
        released_(released) {}
  /// Input i; undefined if it was absent.
  Tensor input(int i) const;
  /// The op's output, part of the graph under create_graph.
  Tensor output() const;
  /// What forward kept as number i.
  Tensor kept(int i) const;

 private:
  void check_alive() const;
  const Node& node_;
  unsigned saves_;
  std::span<const SavedTensor> inputs_;
  const SavedTensor& output_;
  std::span<const SavedTensor> kept_;
  bool released_;
};

/// What an op saves: all that `saves` names, or what saves_for(i) names for the inputs that require
/// grad.
template <class Op, size_t N>
unsigned saved_by(const Op& op, const std::array<const Tensor*, N>& inputs) {
  if constexpr (requires { op.saves_for(0); }) {
    unsigned saves = 0;
    for (size_t i = 0; i < N; ++i)
      if (inputs[i]->defined() && inputs[i]->node()) saves |= op.saves_for(static_cast<int>(i));
    return saves;
  } else {
    return op.saves;
  }
}

/// The node of an op with N inputs.
template <class Op, int N>
class OpNode final : public Node {
 public:
  OpNode(Op op, const std::array<const Tensor*, N>& inputs, const Tensor& y, Saver& saver)
      : op_(std::move(op)), saves_(saved_by(op_, inputs)), kept_(saver.take()) {
    static_cast<void>(detail::registered<Op>);
    this->inputs.resize(N);
    for (int i = 0; i < N; ++i) {
      if (!inputs[i]->defined()) continue;
      this->inputs[i] = inputs[i]->node();
      if (saves_ & kInput(i)) saved_[i] = SavedTensor(*inputs[i], this->inputs[i]);
    }
    if (saves_ & kOutput) output_ = SavedTensor(y, nullptr);
  }
  const char* name() const override { return Op::name; }
  void backward(const Tensor& dy, InputGradients& dx) override {
    op_.backward(Saved(*this, saves_, saved_, output_, kept_, released_), dy, dx);
  }
  void release_saved() override {
    released_ = saves_ != 0 || !kept_.empty();
    for (SavedTensor& s : saved_) s.reset();
    output_.reset();
    for (SavedTensor& s : kept_) s.reset();
  }

 private:
  Op op_;
  unsigned saves_;
  std::array<SavedTensor, N> saved_;
  SavedTensor output_;
  std::vector<SavedTensor> kept_;
  bool released_ = false;
};

namespace detail {
/// Sets y's node.
LOCKSTEP_API void attach(const Tensor& y, Ref<Node> node);
/// Throws if an op must not write to x; `records` says whether the op is recorded.
LOCKSTEP_API void check_in_place(const char* op, const Tensor& x, bool records);
/// Sets the node of x, whose elements an op has just changed. If x is a view, its base gets a node
/// too: the previous base with the view's elements replaced.
LOCKSTEP_API void attach_in_place(const Tensor& x, Ref<Node> node);

/// Makes y, which shares x's storage, a view of x: in-place ops on either reach the other's gradient.
LOCKSTEP_API void become_view(const Tensor& y, const Tensor& x);

/// Which input y, the result of a forward, is or is a view of; null for none. A view that alone holds
/// its storage is an ordinary tensor.
LOCKSTEP_API const Tensor* source_of(const char* op, const Tensor& y,
                                     std::span<const Tensor* const> inputs);

/// Records the result of a forward: `record` asks for a node, and make_node(y) makes it. A result that
/// is an input keeps that one's node apart, and what shares an input's storage is a view of it.
template <class MakeNode>
Tensor finish(const char* op, Tensor y, std::span<const Tensor* const> inputs, bool record,
              MakeNode make_node) {
  const Tensor* source = source_of(op, y, inputs);
  record = record && is_floating(y.dtype());
  if (record) {
    if (source && source->is_same(y)) y = y.detach();
    attach(y, make_node(y));
  }
  if (source && is_grad_enabled() && !source->is_same(y)) become_view(y, *source);
  return y;
}

template <class Op, class... Inputs>
Tensor run_forward(Op& op, Saver& saver, const Inputs&... inputs) {
  const NoGradGuard guard;
  if constexpr (requires { op.forward(saver, inputs...); })
    return op.forward(saver, inputs...);
  else
    return op.forward(inputs...);
}

template <class... Inputs>
bool records(const Inputs&... inputs) {
  return is_grad_enabled() && ((inputs.defined() && inputs.node()) || ...);
}

/// The version of an input whose gradient is recorded; those of others may change.
inline uint32_t recorded_version(const Tensor& x) {
  return x.defined() && x.node() ? x.storage().version() : 0;
}
[[noreturn]] LOCKSTEP_API void fail_changed_input(const char* op, const Tensor& x, size_t i);

template <class Op, class... Inputs>
Tensor apply(Op op, const Inputs&... inputs) {
  const bool record = records(inputs...);
  const std::array<const Tensor*, sizeof...(Inputs)> all{&inputs...};
  const std::array<uint32_t, sizeof...(Inputs)> versions{recorded_version(inputs)...};
  Saver saver(record);
  Tensor y = run_forward(op, saver, inputs...);
  if (record)
    for (size_t i = 0; i < all.size(); ++i)
      if (recorded_version(*all[i]) != versions[i]) fail_changed_input(Op::name, *all[i], i);
  return finish(Op::name, std::move(y), all, record, [&](const Tensor& result) {
    return make_ref<OpNode<Op, sizeof...(Inputs)>>(std::move(op), all, result, saver);
  });
}
}  // namespace detail

/// Runs op.forward on the inputs (an undefined Tensor is an absent one) and, when grad mode is on
/// and an input requires grad, makes the op's node the result's node.
template <class Op, class... Inputs>
Tensor apply(Op op, const Inputs&... inputs) {
  if (detail::op_hooks()) [[unlikely]] {
    const std::array<Tensor, sizeof...(Inputs)> held{inputs...};
    return detail::call_op_hooks(detail::op_info<Op>(), held, 1, [&] {
      return std::vector<Tensor>{detail::apply(std::move(op), inputs...)};
    })[0];
  }
  return detail::apply(std::move(op), inputs...);
}

/// Runs op.forward, which writes its result to x, and makes the op x's node. The first of `inputs`
/// is x before the op: x itself, or a copy of it if backward reads that input. The gradients of x's
/// base and of other views of it pass through the op as well. Throws AutogradError where that is
/// impossible: x is a leaf that requires grad, or a view of one.
template <class Op, class... Inputs>
void apply_in_place(Op op, const Tensor& x, const Inputs&... inputs) {
  const bool record = is_floating(x.dtype()) && detail::records(inputs...);
  detail::check_in_place(Op::name, x, record);
  const auto run = [&] {
    Saver saver(record);
    x.storage().bump_version();
    detail::run_forward(op, saver, inputs...);
    if (record)
      detail::attach_in_place(x, make_ref<OpNode<Op, sizeof...(Inputs)>>(
                                     std::move(op),
                                     std::array<const Tensor*, sizeof...(Inputs)>{&inputs...}, x,
                                     saver));
  };
  if (detail::op_hooks()) [[unlikely]] {
    std::array<Tensor, sizeof...(Inputs)> held{inputs...};
    held[0] = x;
    detail::call_op_hooks(detail::op_info<Op>(true), held, 1, [&] {
      run();
      return std::vector<Tensor>{x};
    });
  } else {
    run();
  }
}

/// An op over a list of tensors of any length (cat, stack): forward takes the span; saves nothing.
template <class Op>
class ListNode final : public Node {
 public:
  ListNode(Op op, std::span<const Tensor> inputs) : op_(std::move(op)) {
    static_cast<void>(detail::registered<Op>);
    for (const Tensor& x : inputs) this->inputs.push_back(x.node());
  }
  const char* name() const override { return Op::name; }
  void backward(const Tensor& dy, InputGradients& dx) override { op_.backward(dy, dx); }

 private:
  Op op_;
};
namespace detail {
template <class Op>
Tensor apply_list(Op op, const std::vector<Tensor>& inputs) {
  bool record = false;
  for (const Tensor& x : inputs) record |= x.node().get() != nullptr;
  Tensor y;
  {
    NoGradGuard guard;
    y = op.forward(inputs);
  }
  std::vector<const Tensor*> all;
  for (const Tensor& x : inputs) all.push_back(&x);
  return detail::finish(
      Op::name, std::move(y), all, record && is_grad_enabled(),
      [&](const Tensor&) { return make_ref<ListNode<Op>>(std::move(op), inputs); });
}
}  // namespace detail
template <class Op>
Tensor apply_list(Op op, const std::vector<Tensor>& inputs) {
  if (detail::op_hooks()) [[unlikely]]
    return detail::call_op_hooks(detail::op_info<Op>(), inputs, 1, [&] {
      return std::vector<Tensor>{detail::apply_list(std::move(op), inputs)};
    })[0];
  return detail::apply_list(std::move(op), inputs);
}

}  // namespace lockstep

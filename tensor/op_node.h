// OpNode: the node of an op, made by apply(). It holds the op's parameters and what its backward
// reads.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/op_info.h>
#include <lockstep/tensor/saved.h>

namespace lockstep {

namespace detail {

/// In place of a number of inputs or outputs: known only when the op runs.
inline constexpr int kMany = -1;

/// N things, or any number.
template <class T, int N>
using List = std::conditional_t<N == kMany, std::vector<T>, std::array<T, N == kMany ? 0 : N>>;
template <class T, int N>
using ListSpan = std::span<T, N == kMany ? std::dynamic_extent : N>;

template <class T, int N>
List<T, N> make_list(size_t n) {
  if constexpr (N == kMany)
    return std::vector<T>(n);
  else
    return {};
}

}  // namespace detail

/// What an op saves: all that `saves` names, or what saves_for(i) names for the inputs that require
/// grad.
template <class Op>
unsigned saved_by(const Op& op, std::span<const Tensor* const> inputs) {
  if constexpr (requires { op.saves_for(0); }) {
    unsigned saves = 0;
    for (size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i]->defined() && inputs[i]->node()) saves |= op.saves_for(static_cast<int>(i));
    return saves;
  } else {
    return op.saves;
  }
}

/// The node of an op with In inputs and Out outputs; detail::kMany stands for any number.
template <class Op, int In, int Out>
class OpNode final : public Node {
 public:
  OpNode(Op op, detail::ListSpan<const Tensor* const, In> inputs,
         detail::ListSpan<const Tensor, Out> outputs, Saver& saver)
      : op_(std::move(op)),
        saves_(saved_by(op_, inputs)),
        edges_(detail::make_list<Edge, In>(inputs.size())),
        kept_(saver.take()) {
    static_cast<void>(detail::registered<Op>);
    this->inputs = edges_;
    set_outputs(outputs);
    if constexpr (In == detail::kMany)  // a long list of which nothing is saved takes no memory
      if (saves_ & (kOutput - 1)) saved_inputs_.resize(inputs.size());
    if constexpr (Out == detail::kMany)
      if (saves_ >= kOutput) saved_outputs_.resize(outputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i]->defined()) continue;
      edges_[i] = edge_of(*inputs[i]);
      if (detail::saves_input(saves_, i))
        saved_inputs_[i] =
            SavedTensor(*inputs[i], edges_[i], {Op::name, SavedFrom::input, static_cast<int>(i)});
    }
    for (size_t i = 0; i < outputs.size(); ++i)
      if (detail::saves_output(saves_, i))
        saved_outputs_[i] = SavedTensor(outputs[i], {nullptr, static_cast<int>(i)},
                                        {Op::name, SavedFrom::output, static_cast<int>(i)}, true);
  }
  const char* name() const override { return Op::name; }
  void backward(std::span<const Tensor> dys, InputGradients& dx) override {
    const Saved saved(*this, saves_, saved_inputs_, saved_outputs_, kept_, released_);
    if constexpr (requires { op_.backward(saved, dys[0], dx); }) {
      static_assert(Out == 1, "an op with several outputs takes their gradients as a span");
      op_.backward(saved, dys[0], dx);
    } else {
      op_.backward(saved, dys, dx);
    }
  }
  void release_saved() override {
    released_ = saves_ != 0 || !kept_.empty();
    for (SavedTensor& s : saved_inputs_) s.reset();
    for (SavedTensor& s : saved_outputs_) s.reset();
    for (SavedTensor& s : kept_) s.reset();
  }

 private:
  Op op_;
  unsigned saves_;
  detail::List<Edge, In> edges_;
  detail::List<SavedTensor, In> saved_inputs_;
  detail::List<SavedTensor, Out> saved_outputs_;
  std::vector<SavedTensor> kept_;
  bool released_ = false;
};

}  // namespace lockstep

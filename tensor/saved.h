// What an op keeps for its backward: inputs, outputs, and what its forward computed beside them.
// All of it is checked for changes in place and goes with the graph.
#pragma once

#include <span>
#include <vector>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/saved_tensor_hooks.h>

namespace lockstep {

/// The tensors that an op's backward reads, or'ed in its `saves`: kInput(0) | kOutput. Of an op with
/// several outputs, output i is kOutput << i, for i below 8.
constexpr unsigned kInput(int i) { return 1u << i; }
inline constexpr unsigned kInputs = 1u << 23;  // every input, of an op over a list
inline constexpr unsigned kOutput = 1u << 24;

namespace detail {
constexpr bool saves_input(unsigned saves, size_t i) {
  return saves & kInputs || (i < 23 && saves & kInput(static_cast<int>(i)));
}
constexpr bool saves_output(unsigned saves, size_t i) { return i < 8 && saves & kOutput << i; }
}  // namespace detail

/// A tensor saved for backward, with the version of its storage at that moment, or what a
/// SavedTensorHooks made of it. It refers to the storage and the graph, not to the handle it was made
/// from, so that it is in no reference cycle.
class LOCKSTEP_API SavedTensor {
 public:
  SavedTensor() = default;
  /// `edge` is where the tensor comes from; none for a constant. An output of the node that saves it
  /// has an `edge` without node, which is not made yet, and `own`.
  SavedTensor(const Tensor& t, Edge edge, SavedFrom from, bool own = false);
  /// The tensor, part of the graph if grad mode is on. Throws AutogradError when an in-place op has
  /// changed the storage since, unless it was packed. `saver` is the node that saved it.
  Tensor unpack(const SavedFrom& from, const Node& saver) const;
  void reset() { *this = SavedTensor(); }

 private:
  Tensor tensor_;           // undefined if absent or packed
  Ref<RefCounted> packed_;  // what hooks made of it; or null
  Edge edge_;
  uint32_t version_ = 0;
  bool own_ = false;
};

/// Given to an op's forward: saves tensors for backward beside the inputs and the outputs that
/// `saves` names. Does nothing when no graph is recorded.
class LOCKSTEP_API Saver {
 public:
  Saver(const char* op, bool records) : op_(op), records_(records) {}
  /// Saves t, a constant to the derivative, as number i, counted from 0.
  void keep(int i, const Tensor& t);
  /// Saves t as number i, connected under create_graph to where it comes from.
  void keep_connected(int i, const Tensor& t);
  /// Saves t, which forward will return as its result number `output`, as number i.
  void keep_output(int i, const Tensor& t, int output);
  /// Result number `output`, though floating, has no gradient.
  void mark_non_differentiable(int output);

  std::vector<SavedTensor> take() { return std::move(kept_); }
  bool is_differentiable(size_t output) const {
    return output >= constant_.size() || !constant_[output];
  }

 private:
  void keep(int i, SavedTensor saved);
  const char* op_;
  bool records_;
  std::vector<SavedTensor> kept_;
  std::vector<bool> constant_;  // by output
};

/// What an op's backward may read: the inputs and the outputs that `saves` names, and what its
/// forward kept.
class LOCKSTEP_API Saved {
 public:
  Saved(const Node& node, unsigned saves, std::span<const SavedTensor> inputs,
        std::span<const SavedTensor> outputs, std::span<const SavedTensor> kept, bool released)
      : node_(node),
        saves_(saves),
        inputs_(inputs),
        outputs_(outputs),
        kept_(kept),
        released_(released) {}
  /// Input i; undefined if it was absent.
  Tensor input(int i) const;
  /// The op's output i, part of the graph under create_graph.
  Tensor output(int i = 0) const;
  /// What forward kept as number i.
  Tensor kept(int i) const;
  int kept_count() const { return static_cast<int>(kept_.size()); }
  const Node& node() const { return node_; }

 private:
  void check_alive() const;
  const Node& node_;
  unsigned saves_;
  std::span<const SavedTensor> inputs_, outputs_, kept_;
  bool released_;
};

}  // namespace lockstep

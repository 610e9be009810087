// Node: one op in the graph behind its results. The graph consists of nodes whose edges point at the
// nodes of their inputs, each at one of that node's outputs. A Leaf is the node of a tensor that
// accumulates a gradient. The traversal of the graph is in autograd/engine.cpp.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// Receives the gradients of a node's inputs from its backward; made by the engine.
class LOCKSTEP_API InputGradients {
 public:
  virtual ~InputGradients() = default;
  /// Whether the gradient of input i is needed; others need not be computed.
  virtual bool needed(int i) const = 0;
  /// The dtype in which the gradient of input i is wanted: the input's, or, of a leaf, what
  /// set_grad_dtype() says. An op that computes in a wider dtype than the input's may pass its result
  /// to set() unrounded if it has this one.
  virtual DType dtype(int i) const = 0;
  /// Where the gradient of input i may be written directly (contiguous, uninitialised), or
  /// undefined. A product that fills it and passes it to set() saves a copy: this is how gradients
  /// land in DDP's buckets. It has the input's dtype, or the one given.
  virtual Tensor destination(int i) const = 0;
  virtual Tensor destination(int i, DType dtype) const = 0;
  /// The gradient of input i, in the input's shape, and its dtype or the one that is wanted. Call once
  /// for each i that is needed.
  virtual void set(int i, Tensor gradient) = 0;
  /// Declares that the gradient of input i is zero; replaces set().
  virtual void none(int i) = 0;
};

/// Where a tensor comes from: one of a node's outputs. Without a node, it requires no grad.
struct Edge {
  Ref<Node> node;
  int output = 0;
  explicit operator bool() const { return static_cast<bool>(node); }
  bool operator==(const Edge&) const = default;
};

class LOCKSTEP_API Node : public RefCounted {
 public:
  using Hook = std::function<Tensor(const Tensor&)>;
  struct Hooks {
    std::vector<std::pair<uint64_t, Hook>> list;
    std::vector<Ref<Leaf>> retained;  // of tensors that retain_grad(): take the gradient at last
  };
  /// What the gradient of an output must be, and who wants to see it.
  struct LOCKSTEP_API Output {
    Shape shape;
    DType dtype = DType::f32;
    Device device;
    std::shared_ptr<Hooks> hooks;  // null while there are none; HookHandles hold weak pointers

    void describe(const Tensor& y);
    Hooks& make_hooks();
    /// Zeros in the output's shape, dtype and device.
    Tensor zeros() const;
  };

  Node();
  /// The op's name, as in "relu".
  virtual const char* name() const = 0;
  /// From the gradients of the outputs to those of the inputs. `dys` has one for each output,
  /// undefined where none arrived, but not all of them. With grad mode on (create_graph) it records
  /// itself like any forward.
  virtual void backward(std::span<const Tensor> dys, InputGradients& dx) = 0;
  /// This node as a Leaf, or null.
  virtual Leaf* as_leaf() noexcept { return nullptr; }
  /// Frees the saved tensors; called after backward unless the graph is retained.
  virtual void release_saved() {}

  int outputs() const { return outputs_; }
  Output& output(int i = 0) { return i == 0 ? first_ : others_[static_cast<size_t>(i) - 1]; }
  const Output& output(int i = 0) const { return const_cast<Node*>(this)->output(i); }

  std::span<const Edge> inputs;  // by input of the op; in the subclass, without memory of its own
  uint64_t sequence;  // grows with creation on a thread: later nodes run first in backward

 protected:
  /// The tensors that this node makes.
  void set_outputs(std::span<const Tensor> ys);
  void dispose() noexcept override;  // unlinks a chain of any length, without recursion or memory

 private:
  int outputs_ = 1;
  Output first_;
  std::unique_ptr<Output[]> others_;
  Node* next_doomed_ = nullptr;
};

namespace detail {
/// Whether t has these strides, those of dimensions of size 1 aside.
bool has_strides(const Tensor& t, const Strides& strides);
/// A copy of t with these strides, or contiguous if they have gaps or repeat.
Tensor copy_with_strides(const Tensor& t, const Strides& strides);
}  // namespace detail

/// Where t comes from.
inline Edge edge_of(const Tensor& t) { return {t.node(), t.body().output}; }

/// The Node::sequence of the next node that this thread makes.
LOCKSTEP_API uint64_t next_node_sequence() noexcept;

/// Notified by the engine during a backward that reaches the leaves it watches. DDP implements it.
class LOCKSTEP_API BackwardWatcher {
 public:
  virtual ~BackwardWatcher() = default;
  /// Before backward_starts: Node::sequence of each node that this backward will run, unordered. Also
  /// before an autograd::grad without create_graph whose graph leads to a watched leaf.
  virtual void backward_runs(std::span<const uint64_t>) {}
  /// Before the first node runs: this backward will accumulate into these of the watched leaves.
  virtual void backward_starts(std::span<Leaf* const> reached) = 0;
  /// A watched leaf has accumulated its gradient, and the leaf's own hooks have run.
  virtual void leaf_ready(Leaf& leaf) = 0;
  /// Outside a backward: a watched leaf's gradient, which is its slot, is about to be written. Whoever
  /// else holds it keeps what it holds.
  virtual void slot_changes(Leaf&) {}
  /// After the last node ran, or when one threw (`failed`); may itself throw when `failed` is
  /// false.
  virtual void backward_ends(bool failed) = 0;
};

/// The node of a tensor that requires grad and was not made by an op. It holds the gradient. That of
/// another tensor with retain_grad() is held by a Leaf outside the graph.
struct LOCKSTEP_API Leaf final : Node {
  using PostHook = std::function<void(const Tensor&)>;
  using PostHooks = std::vector<std::pair<uint64_t, PostHook>>;

  explicit Leaf(TensorBody* owner);
  const char* name() const override { return "leaf"; }
  void backward(std::span<const Tensor>, InputGradients&) override {}
  Leaf* as_leaf() noexcept override { return this; }

  /// Adds the gradient of one backward, of gradient_dtype(), then runs the post hooks. `may_take` says that the caller
  /// holds the only reference, so that it can be stored without a copy. The gradient has the
  /// tensor's strides. A gradient that is referenced elsewhere is replaced, not changed. Several
  /// threads may accumulate into one leaf.
  void accumulate(Tensor gradient, bool may_take);
  /// The dtype that the gradient has.
  DType gradient_dtype() const { return grad_dtype.value_or(output().dtype); }
  /// What zero_grad does to one tensor: its gradient becomes undefined, or zeros in place.
  void zero_grad(bool set_to_none);

  /// The tensor is destroyed, perhaps while another thread accumulates.
  void owner_is_destroyed() noexcept;

  TensorBody* owner;  // the tensor; null once it is destroyed
  Tensor gradient;
  std::optional<DType> grad_dtype;  // of `gradient`, where it is not the tensor's own
  bool retains = false;             // outside the graph: an op made the tensor
  bool accumulated = false;  // a backward has added to it since it was cleared, assigned or reduced
  /// The tensor does not require grad for now. Atomic, because one thread may freeze a leaf of the
  /// graph that another traverses.
  std::atomic<bool> frozen{false};
  Tensor slot;  // where the first contribution is to be written (DDP's bucket); or undefined
  /// A backward under way has its contribution in the slot. One that a node starts inside it then adds
  /// up elsewhere.
  bool slot_lent = false;
  BackwardWatcher* watcher = nullptr;
  int watcher_index = 0;  // the watcher's own number for this leaf
  std::shared_ptr<PostHooks> post_hooks = std::make_shared<PostHooks>();

 private:
  void add_to_gradient(Tensor g, bool may_take);
  std::mutex mutex_;  // of owner and gradient in accumulate() and owner_is_destroyed()
};

/// Whether ops record the graph on this thread; NoGradGuard turns it off for a scope.
LOCKSTEP_API bool is_grad_enabled() noexcept;
LOCKSTEP_API void set_grad_enabled(bool on) noexcept;

class AutoGradMode {
 public:
  explicit AutoGradMode(bool on) : before_(is_grad_enabled()) { set_grad_enabled(on); }
  ~AutoGradMode() { set_grad_enabled(before_); }
  AutoGradMode(const AutoGradMode&) = delete;

 private:
  bool before_;
};
struct NoGradGuard : AutoGradMode {
  NoGradGuard() : AutoGradMode(false) {}
};
struct EnableGradGuard : AutoGradMode {
  EnableGradGuard() : AutoGradMode(true) {}
};

}  // namespace lockstep

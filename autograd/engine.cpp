// Reverse-mode traversal of the graph: count how often each reachable node is used, notify the
// watchers of leaves, then run the nodes whose gradient is complete, latest made first.
#include <algorithm>
#include <queue>
#include <unordered_map>

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/task.h>
#include <lockstep/tensor/node.h>

namespace lockstep {
namespace {

using engine::Arrival, engine::gradient_dtype, engine::repeats, engine::Task;

class Backward {
 public:
  Backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& gradients,
           const std::vector<Tensor>* inputs, bool retain, bool create)
      : retain_(retain || create), create_(create) {
    for (const Tensor& y : outputs) roots_.push_back(edge_of(y));
    if (inputs) {
      capturing_ = true;
      for (const Tensor& x : *inputs) {
        const Edge edge = edge_of(x);
        Arrival& arrival = tasks_[edge.node.get()].at(edge);
        if (arrival.capture < 0) arrival.capture = static_cast<int>(captured_.size());
        captured_.emplace_back();
      }
      mark_needed();
    }
    count_uses();
    for (size_t i = 0; i < outputs.size(); ++i) {
      // The caller's gradient must not be added to in place.
      const AutoGradMode mode(create_);
      receive(roots_[i], gradients[i].to(gradient_dtype(roots_[i])), false);
    }
  }

  ~Backward() {
    for (Leaf* leaf : lent_) take_back_slot(*leaf, tasks_[leaf]);
  }
  Backward(const Backward&) = delete;

  std::vector<Tensor> run() {
    const AutoGradMode mode(create_);
    const auto watchers = tell_watchers();
    try {
      for (const Edge& root : roots_) finish_use(*root.node);
      while (!ready_.empty()) {
        const Ref<Node> node = ready_.top();
        ready_.pop();
        step(*node);
      }
    } catch (...) {
      for (BackwardWatcher* w : watchers) w->backward_ends(true);
      throw;
    }
    for (size_t i = 0; i < watchers.size(); ++i) {
      try {
        watchers[i]->backward_ends(false);
      } catch (...) {
        for (size_t j = i + 1; j < watchers.size(); ++j) watchers[j]->backward_ends(true);
        throw;
      }
    }
    return std::move(captured_);
  }

 private:
  /// For grad(): a node is needed if it is one of grad()'s inputs or one of its inputs is needed
  /// (post-order traversal).
  void mark_needed() {
    std::vector<std::pair<Node*, size_t>> stack;
    std::unordered_map<Node*, bool> entered;
    auto enter = [&](Node* n) {
      if (!std::exchange(entered[n], true)) {
        tasks_[n].needed = tasks_[n].captured();
        stack.emplace_back(n, 0);
      }
    };
    for (const Edge& root : roots_) {
      enter(root.node.get());
      while (!stack.empty()) {
        auto& [n, next] = stack.back();
        if (next > 0 && n->inputs[next - 1] && tasks_[n->inputs[next - 1].node.get()].needed)
          tasks_[n].needed = true;
        if (next == n->inputs.size())
          stack.pop_back();
        else if (Node* input = n->inputs[next++].node.get())
          enter(input);
      }
    }
  }

  void count_uses() {
    std::vector<Node*> stack;
    auto visit = [&](Node* n) {
      Task& task = tasks_[n];
      if (!task.needed || task.pending++ > 0) return;
      Leaf* leaf = n->as_leaf();
      if (!leaf)
        stack.push_back(n);
      else if (leaf->frozen)  // after the graph was made
        task.needed = false;
      else
        leaves_.push_back(leaf);
    };
    for (const Edge& root : roots_) visit(root.node.get());
    while (!stack.empty()) {
      Node* n = stack.back();
      stack.pop_back();
      for (const Edge& input : n->inputs)
        if (input) visit(input.node.get());
    }
  }

  std::vector<BackwardWatcher*> tell_watchers() {
    std::vector<BackwardWatcher*> watchers;
    if (capturing_) {
      if (!create_) tell_of_grad();
      return watchers;
    }
    for (Leaf* leaf : leaves_)
      if (leaf->watcher &&
          std::find(watchers.begin(), watchers.end(), leaf->watcher) == watchers.end())
        watchers.push_back(leaf->watcher);
    std::vector<uint64_t> nodes;
    if (!watchers.empty())
      for (const auto& [node, task] : tasks_)
        if (task.pending > 0) nodes.push_back(node->sequence);
    for (size_t i = 0; i < watchers.size(); ++i) {
      std::vector<Leaf*> reached;
      for (Leaf* leaf : leaves_)
        if (leaf->watcher == watchers[i]) reached.push_back(leaf);
      try {
        watchers[i]->backward_runs(nodes);
        watchers[i]->backward_starts(reached);
      } catch (...) {
        for (size_t j = 0; j < i; ++j) watchers[j]->backward_ends(true);
        throw;
      }
    }
    return watchers;
  }

  /// grad() accumulates into no leaf; who watches one behind it learns that this part of the graph was
  /// of use.
  void tell_of_grad() {
    std::vector<BackwardWatcher*> watchers;
    std::vector<uint64_t> nodes;
    for (const auto& [node, task] : tasks_) {
      if (task.needed) nodes.push_back(node->sequence);
      const Leaf* leaf = node->as_leaf();
      if (leaf && leaf->watcher &&
          std::find(watchers.begin(), watchers.end(), leaf->watcher) == watchers.end())
        watchers.push_back(leaf->watcher);
    }
    for (BackwardWatcher* w : watchers) w->backward_runs(nodes);
  }

  /// Adds a contribution to the gradient of a node's output.
  void receive(const Edge& edge, Tensor g, bool own) {
    Arrival& at = tasks_[edge.node.get()].at(edge);
    if (!at.gradient.defined()) {
      at.gradient = std::move(g);
      at.own = own;
    } else if (at.own && !create_) {
      at.gradient.add_(g);
    } else {
      Tensor sum = at.gradient.clone();
      sum.add_(g);
      at.gradient = std::move(sum);
      at.own = true;
    }
  }

  void finish_use(Node& node) {
    Task& task = tasks_[&node];
    if (!task.needed || --task.pending > 0) return;
    if (Leaf* leaf = node.as_leaf())
      finish_leaf(*leaf, task);
    else
      ready_.push(Ref<Node>(&node));
  }

  void run_hooks(const Node::Output& output, DType dtype, Arrival& arrival) {
    if (!output.hooks) return;
    for (auto& [id, hook] : std::vector(output.hooks->list))
      if (Tensor replaced = hook(arrival.gradient); replaced.defined()) {
        LOCKSTEP_CHECK(replaced.shape() == output.shape, ShapeError,
                       "register_hook: a hook returned a gradient of shape ", replaced.shape(),
                       " for a tensor of shape ", output.shape);
        LOCKSTEP_CHECK(replaced.dtype() == dtype, DTypeError,
                       "register_hook: a hook returned a gradient of ", replaced.dtype(),
                       dtype == output.dtype ? " for a tensor of " : " for one with gradients in ",
                       dtype, "; convert it with to()");
        LOCKSTEP_CHECK(replaced.device() == output.device, DeviceError,
                       "register_hook: a hook returned a gradient on ", replaced.device(),
                       " for a tensor on ", output.device);
        arrival.gradient = std::move(replaced);
        arrival.own = false;
      }
    for (const Ref<Leaf>& leaf : std::vector(output.hooks->retained))
      leaf->accumulate(arrival.gradient, false);
    arrival.own = arrival.own && arrival.gradient.ref()->use_count() == 1 &&
                  arrival.gradient.storage().use_count() == 1;  // a hook may have kept it
  }

  /// The complete gradient of an output, after its hooks; undefined if none arrived.
  Tensor take(const Node::Output& output, DType dtype, Arrival& arrival) {
    if (!arrival.gradient.defined()) return Tensor();
    run_hooks(output, dtype, arrival);
    if (arrival.capture >= 0) captured_[static_cast<size_t>(arrival.capture)] = arrival.gradient;
    return std::exchange(arrival.gradient, Tensor());
  }

  Tensor take(const Node& node, int output, Arrival& arrival) {
    return take(node.output(output), node.output(output).dtype, arrival);
  }

  void take_back_slot(Leaf& leaf, Task& task) {
    if (std::exchange(task.slot, false)) leaf.slot_lent = false;
  }

  void finish_leaf(Leaf& leaf, Task& task) {
    Tensor g = take(leaf.output(), leaf.gradient_dtype(), task.first);
    take_back_slot(leaf, task);
    if (g.defined() && !capturing_) leaf.accumulate(std::move(g), task.first.own);
  }

  class Inputs final : public InputGradients {
   public:
    Inputs(Backward& walk, Node& node) : walk_(walk), node_(node) {}
    bool needed(int i) const override {
      const Ref<Node>& node = input(i).node;
      return node && walk_.tasks_[node.get()].needed;
    }
    bool any_needed() const {
      return std::any_of(node_.inputs.begin(), node_.inputs.end(),
                         [&](const Edge& e) { return e && walk_.tasks_[e.node.get()].needed; });
    }
    DType dtype(int i) const override {
      const Edge& edge = input(i);
      return edge ? gradient_dtype(edge) : DType::f32;
    }
    Tensor destination(int i) const override {
      const Edge& edge = input(i);
      return edge ? destination(i, edge.node->output(edge.output).dtype) : Tensor();
    }
    Tensor destination(int i, DType dtype) const override {
      const Ref<Node>& node = input(i).node;
      Leaf* leaf = node ? node->as_leaf() : nullptr;
      if (!leaf || !leaf->slot.defined() || leaf->slot.dtype() != dtype ||
          leaf->gradient.defined() || walk_.create_ || walk_.capturing_)
        return Tensor();
      Task& task = walk_.tasks_[leaf];
      if (!task.needed || task.first.gradient.defined() || (leaf->slot_lent && !task.slot))
        return Tensor();
      if (!std::exchange(task.slot, true)) walk_.lent_.push_back(leaf);
      leaf->slot_lent = true;
      return leaf->slot;
    }
    void none(int i) override { mark(i); }
    void set(int i, Tensor g) override {
      mark(i);
      if (!needed(i)) return;
      const Edge& edge = node_.inputs[static_cast<size_t>(i)];
      const Node::Output& input = edge.node->output(edge.output);
      LOCKSTEP_CHECK(g.defined(), AutogradError, "backward of ", node_.name(),
                     ": the gradient of input ", i, " is undefined; say dx.none(", i,
                     ") where it is zero");
      LOCKSTEP_CHECK(g.shape() == input.shape, ShapeError, "backward of ", node_.name(),
                     ": the gradient of input ", i, " has shape ", g.shape(), ", the input ",
                     input.shape);
      const DType wanted = gradient_dtype(edge);
      LOCKSTEP_CHECK(g.dtype() == input.dtype || g.dtype() == wanted, DTypeError, "backward of ",
                     node_.name(), ": the gradient of input ", i, " is ", g.dtype(), ", the input ",
                     input.dtype);
      if (g.dtype() != wanted) g = g.to(wanted);
      // A gradient that is dy, a view of it, or kept by the op may be in use elsewhere too; one
      // that was expanded cannot be added to.
      const bool own = g.ref()->use_count() == 1 && g.storage().use_count() == 1 && !repeats(g);
      const Leaf* leaf = edge.node->as_leaf();
      const bool is_slot = leaf && leaf->slot.defined() && g.is_same(leaf->slot);
      walk_.receive(edge, std::move(g), own || is_slot);
    }

    /// Throws if the node's backward did not set a gradient that is needed.
    void check_complete() const {
      for (size_t i = 0; i < std::min<size_t>(node_.inputs.size(), 64); ++i)
        LOCKSTEP_CHECK((said_ >> i & 1) || !needed(static_cast<int>(i)), AutogradError,
                       "backward of ", node_.name(), ": it did not set the gradient of input ", i,
                       ", which is needed; call dx.set(", i, ", ...), or dx.none(", i,
                       ") where it is zero");
    }

   private:
    const Edge& input(int i) const {
      LOCKSTEP_CHECK(i >= 0 && static_cast<size_t>(i) < node_.inputs.size(), AutogradError,
                     "backward of ", node_.name(), ": it names input ", i, ", and the op has ",
                     node_.inputs.size(), ", counted from 0");
      return node_.inputs[static_cast<size_t>(i)];
    }
    void mark(int i) {
      input(i);
      if (i >= 64) return;
      const uint64_t bit = uint64_t{1} << i;
      LOCKSTEP_CHECK(!(said_ & bit), AutogradError, "backward of ", node_.name(),
                     ": it sets the gradient of input ", i,
                     " twice; add the parts and set the sum");
      said_ |= bit;
    }
    Backward& walk_;
    Node& node_;
    uint64_t said_ = 0;  // by input: set or declared zero; inputs after the 64th are not checked
  };

  void step(Node& node) {
    Task& task = tasks_[&node];
    if (task.arrived()) {
      if (task.others.empty() && node.outputs() == 1) {
        const Tensor dy = take(node, 0, task.first);
        run_backward(node, std::span(&dy, 1));
      } else {
        std::vector<Tensor> dys;
        dys.push_back(take(node, 0, task.first));
        task.others.resize(static_cast<size_t>(node.outputs()) - 1);
        for (int i = 1; i < node.outputs(); ++i)
          dys.push_back(take(node, i, task.others[static_cast<size_t>(i) - 1]));
        run_backward(node, dys);
      }
    }
    for (const Edge& input : node.inputs)
      if (input) finish_use(*input.node);
  }

  void run_backward(Node& node, std::span<const Tensor> dys) {
    Inputs inputs(*this, node);
    if (capturing_ && !inputs.any_needed()) return;  // grad() asked for the node's outputs alone
    node.backward(dys, inputs);
    inputs.check_complete();
    if (!retain_) node.release_saved();
  }

  struct MadeEarlier {
    bool operator()(const Ref<Node>& a, const Ref<Node>& b) const {
      return a->sequence < b->sequence;
    }
  };

  bool retain_, create_, capturing_ = false;
  std::vector<Edge> roots_;
  std::unordered_map<Node*, Task> tasks_;
  std::vector<Leaf*> leaves_;
  std::vector<Leaf*> lent_;  // those whose slots ops were given
  std::priority_queue<Ref<Node>, std::vector<Ref<Node>>, MadeEarlier> ready_;
  std::vector<Tensor> captured_;
};

Tensor start_gradient(const Tensor& y, const Tensor& given, const char* who) {
  LOCKSTEP_CHECK(y.requires_grad(), AutogradError, who,
                 ": the tensor does not require grad and has no graph behind it",
                 is_grad_enabled() ? "; nothing that it was made of requires grad: parameters that "
                                     "are frozen, data that were detach()ed, integers, or ops "
                                     "under NoGradGuard"
                                   : "; ops are not recorded here, under NoGradGuard or in a "
                                     "backward: put an EnableGradGuard before them");
  if (!given.defined()) {
    LOCKSTEP_CHECK(y.numel() == 1, AutogradError, who, ": the tensor has shape ", y.shape(),
                   "; only one element can start without a gradient; reduce it (mean, sum) or pass "
                   "the gradient");
    return ones_like(y);
  }
  LOCKSTEP_CHECK(given.shape() == y.shape(), ShapeError, who, ": the gradient has shape ",
                 given.shape(), ", the tensor ", y.shape());
  LOCKSTEP_CHECK(given.dtype() == y.dtype(), DTypeError, who, ": the gradient is ", given.dtype(),
                 ", the tensor ", y.dtype());
  return given;
}

}  // namespace

void Tensor::backward(const Tensor& gradient, BackwardOptions options) const {
  const Tensor start = start_gradient(*this, gradient, "backward");
  Backward({*this}, {start}, nullptr, options.retain_graph, options.create_graph).run();
}

namespace autograd {

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const std::vector<Tensor>& grad_outputs, GradOptions options) {
  LOCKSTEP_CHECK(grad_outputs.empty() || grad_outputs.size() == outputs.size(), ValueError,
                 "grad: ", outputs.size(), " outputs but ", grad_outputs.size(), " gradients");
  std::vector<Tensor> starts;
  for (size_t i = 0; i < outputs.size(); ++i)
    starts.push_back(
        start_gradient(outputs[i], grad_outputs.empty() ? Tensor() : grad_outputs[i], "grad"));
  for (size_t i = 0; i < inputs.size(); ++i)
    LOCKSTEP_CHECK(inputs[i].requires_grad(), AutogradError, "grad: input ", i,
                   " does not require grad");
  auto results =
      Backward(outputs, starts, &inputs, options.retain_graph, options.create_graph).run();
  for (size_t i = 0; i < results.size(); ++i)  // an input that is listed twice
    for (size_t j = 0; j < i && !results[i].defined(); ++j)
      if (edge_of(inputs[i]) == edge_of(inputs[j])) results[i] = results[j];
  for (size_t i = 0; i < results.size(); ++i)
    LOCKSTEP_CHECK(results[i].defined() || options.allow_unused, AutogradError,
                   "grad: no output depends on input ", i,
                   "; pass {.allow_unused = true} to get an undefined tensor for it");
  return results;
}

}  // namespace autograd
}  // namespace lockstep

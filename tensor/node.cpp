// Nodes and leaves: creation, destruction, and how a leaf takes a gradient.
#include <lockstep/tensor/node.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

LOCKSTEP_THREAD_LOCAL bool grad_enabled = true;
LOCKSTEP_THREAD_LOCAL uint64_t next_sequence = 0;

bool is_held_elsewhere(const Tensor& t) {
  return t.ref()->use_count() > 1 || t.storage().use_count() > 1;
}

}  // namespace

bool detail::has_strides(const Tensor& t, const Strides& strides) {
  for (int d = 0; d < t.dim(); ++d)
    if (t.shape()[d] > 1 && t.strides()[d] != strides[d]) return false;
  return true;
}

Tensor detail::copy_with_strides(const Tensor& t, const Strides& strides) {
  const TensorOptions options{.dtype = t.dtype(), .device = t.device()};
  int64_t last = 0;
  bool repeats = false;
  for (int d = 0; d < t.dim(); ++d) {
    last += (t.shape()[d] - 1) * strides[d];
    repeats |= t.shape()[d] > 1 && strides[d] == 0;
  }
  const bool dense = !repeats && t.numel() > 0 && last == t.numel() - 1;
  Tensor copy = dense ? empty_strided(t.shape(), strides, options) : empty(t.shape(), options);
  copy.copy_(t);
  return copy;
}

bool is_grad_enabled() noexcept { return grad_enabled; }
void set_grad_enabled(bool on) noexcept { grad_enabled = on; }

uint64_t next_node_sequence() noexcept { return next_sequence; }

Node::Node() : sequence(next_sequence++) {}

void Node::dispose() noexcept {
  // A chain of nodes would be destroyed with one stack frame per link. Instead the first node deletes
  // those that follow one after the other; they are linked, since a list would need memory.
  thread_local Node* doomed = nullptr;
  thread_local bool deleting = false;
  next_doomed_ = std::exchange(doomed, this);
  if (deleting) return;
  deleting = true;
  while (Node* node = doomed) {
    doomed = node->next_doomed_;
    delete node;
  }
  deleting = false;
}

void Node::Output::describe(const Tensor& y) {
  shape = y.shape();
  dtype = y.dtype();
  device = y.device();
}

Node::Hooks& Node::Output::make_hooks() {
  if (!hooks) hooks = std::make_shared<Hooks>();
  return *hooks;
}

Tensor Node::Output::zeros() const {
  return lockstep::zeros(shape, {.dtype = dtype, .device = device});
}

void Node::set_outputs(std::span<const Tensor> ys) {
  outputs_ = static_cast<int>(ys.size());
  if (outputs_ > 1) others_ = std::make_unique<Output[]>(ys.size() - 1);
  for (int i = 0; i < outputs_; ++i) output(i).describe(ys[static_cast<size_t>(i)]);
}

Leaf::Leaf(TensorBody* owner) : owner(owner) {
  output().shape = owner->shape;
  output().dtype = owner->dtype;
  output().device = owner->storage->device();
}

void Leaf::accumulate(Tensor g, bool may_take) {
  Tensor self;  // keeps the tensor until the hooks have run
  {
    const std::lock_guard lock(mutex_);
    if (!owner || !owner->retain_if_alive()) return;  // it is destroyed, or just now
    self = Tensor(Ref<TensorBody>(owner));
    owner->release();
    add_to_gradient(std::move(g), may_take);
    accumulated = true;
  }
  for (auto& [id, hook] : PostHooks(*post_hooks)) hook(self);
  if (watcher) watcher->leaf_ready(*this);
}

void Leaf::owner_is_destroyed() noexcept {
  Tensor last;  // its gradient: one made with create_graph refers back to the leaf
  const std::lock_guard lock(mutex_);
  owner = nullptr;
  std::swap(last, gradient);
}

void Leaf::add_to_gradient(Tensor g, bool may_take) {
  if (slot.defined() && !slot_lent) {
    // The gradient is stored in the slot; one that was assigned, or added up elsewhere, goes there.
    NoGradGuard guard;
    if (g.is_same(slot)) {
      if (gradient.defined()) slot.add_(gradient.detach());
    } else if (gradient.defined()) {
      if (!gradient.is_same(slot)) slot.copy_(gradient);
      slot.add_(g.detach());
    } else {
      slot.copy_(g.detach());
    }
    gradient = slot;
    g = Tensor();  // the watcher checks the slot's use count
  } else if (!gradient.defined()) {
    gradient = may_take && detail::has_strides(g, owner->strides)
                   ? std::move(g)
                   : detail::copy_with_strides(g, owner->strides);
  } else if (is_grad_enabled() || is_held_elsewhere(gradient)) {
    // With create_graph both may be part of a graph; a gradient held elsewhere must not change.
    Tensor sum = detail::copy_with_strides(gradient, owner->strides);
    sum.add_(g);
    gradient = std::move(sum);
  } else {
    gradient.add_(g);
  }
}

void Leaf::zero_grad(bool set_to_none) {
  accumulated = false;
  if (set_to_none) gradient = Tensor();
  if (!gradient.defined()) return;
  const NoGradGuard guard;
  if (gradient.requires_grad()) gradient = gradient.detach();  // made with create_graph
  const bool is_slot = slot.defined() && gradient.is_same(slot);
  if (is_slot && watcher) watcher->slot_changes(*this);
  if (!is_slot && is_held_elsewhere(gradient))
    gradient = zeros_like(gradient);
  else
    gradient.zero_();
}

}  // namespace lockstep

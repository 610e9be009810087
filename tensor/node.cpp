#include <lockstep/tensor/node.h>

#include <algorithm>
#include <utility>

#include <lockstep/tensor/op.h>

namespace lockstep {
namespace {

thread_local bool grad_enabled = true;
thread_local uint64_t next_sequence = 0;

bool is_held_elsewhere(const Tensor& t) {
  return t.ref()->use_count() > 1 || t.storage().use_count() > 1;
}

/// Whether t has the strides of `like`, those of dimensions of size 1 aside.
bool lies_like(const Tensor& t, const TensorBody& like) {
  for (int d = 0; d < t.dim(); ++d)
    if (t.shape()[d] > 1 && t.strides()[d] != like.strides[d]) return false;
  return true;
}

/// A copy of t with the strides of `like`, or contiguous if those have gaps or repeat.
Tensor copy_like(const Tensor& t, const TensorBody& like) {
  const TensorOptions options{.dtype = t.dtype(), .device = t.device()};
  int64_t last = 0;
  bool repeats = false;
  for (int d = 0; d < t.dim(); ++d) {
    last += (t.shape()[d] - 1) * like.strides[d];
    repeats |= t.shape()[d] > 1 && like.strides[d] == 0;
  }
  const bool dense = !repeats && t.numel() > 0 && last == t.numel() - 1;
  Tensor copy = dense ? empty_strided(t.shape(), like.strides, options) : empty(t.shape(), options);
  copy.copy_(t);
  return copy;
}

}  // namespace

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

Leaf::Leaf(TensorBody* owner) : owner(owner) {
  shape = owner->shape;
  dtype = owner->dtype;
  device = owner->storage->device();
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
  if (slot.defined()) {
    // The gradient is stored in the slot; a gradient that was assigned meanwhile is copied there.
    NoGradGuard guard;
    if (gradient.defined()) {
      if (!gradient.is_same(slot)) slot.copy_(gradient);
      slot.add_(g.detach());
    } else if (!g.is_same(slot)) {
      slot.copy_(g.detach());
    }
    gradient = slot;
    g = Tensor();  // the watcher checks the slot's use count
  } else if (!gradient.defined()) {
    gradient = may_take && lies_like(g, *owner) ? std::move(g) : copy_like(g, *owner);
  } else if (is_grad_enabled() || is_held_elsewhere(gradient)) {
    // With create_graph both may be part of a graph; a gradient held elsewhere must not change.
    Tensor sum = copy_like(gradient, *owner);
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

SavedTensor::SavedTensor(const Tensor& t, Ref<Node> node) : node_(std::move(node)) {
  if (!t.defined()) return;
  tensor_ = t.detach();
  version_ = t.storage().version();
}

Tensor SavedTensor::unpack(const char* op) const {
  if (!tensor_.defined()) return tensor_;  // an absent input
  LOCKSTEP_CHECK(tensor_.storage().version() == version_, AutogradError, "backward of ", op,
                 ": a tensor of shape ", tensor_.shape(),
                 " that it needs was changed in place since (version ", tensor_.storage().version(),
                 ", expected ", version_,
                 "); use the out-of-place form of what changed it, or, if that "
                 "was an optimizer's step or a load, call backward before");
  if (!node_ || !is_grad_enabled()) return tensor_;
  Tensor connected = tensor_.detach();
  connected.body().node = node_;
  return connected;
}

void Saver::keep(int i, const Tensor& t) {
  if (!records_) return;
  kept_.resize(std::max(kept_.size(), static_cast<size_t>(i) + 1));
  kept_[static_cast<size_t>(i)] = SavedTensor(t, nullptr);
}

void Saved::check_alive() const {
  LOCKSTEP_CHECK(!released_, AutogradError, "backward of ", node_.name(),
                 ": its saved tensors were freed by an earlier backward; pass {.retain_graph = "
                 "true} to that one");
}

Tensor Saved::input(int i) const {
  check_alive();
  LOCKSTEP_CHECK(i >= 0 && static_cast<size_t>(i) < inputs_.size() && (saves_ & kInput(i)),
                 AutogradError, "backward of ", node_.name(), ": it reads input ", i,
                 ", which `saves` (or saves_for) does not name; add kInput(", i, ")");
  return inputs_[static_cast<size_t>(i)].unpack(node_.name());
}

Tensor Saved::output() const {
  check_alive();
  LOCKSTEP_CHECK(saves_ & kOutput, AutogradError, "backward of ", node_.name(),
                 ": it reads the output, which `saves` (or saves_for) does not name; add kOutput");
  Tensor y = output_.unpack(node_.name());
  if (!is_grad_enabled()) return y;
  y = y.detach();
  y.body().node = Ref<Node>(const_cast<Node*>(&node_));
  return y;
}

Tensor Saved::kept(int i) const {
  check_alive();
  LOCKSTEP_CHECK(i >= 0 && static_cast<size_t>(i) < kept_.size(), AutogradError, "backward of ",
                 node_.name(), ": its forward kept ", kept_.size(), " tensors, and none as number ",
                 i, "; see Saver::keep");
  return kept_[static_cast<size_t>(i)].unpack(node_.name());
}

namespace detail {

void attach(const Tensor& y, Ref<Node> node) {
  node->shape = y.shape();
  node->dtype = y.dtype();
  node->device = y.device();
  TensorBody& body = y.body();
  body.node = std::move(node);
}
void fail_changed_input(const char* op, const Tensor& x, size_t i) {
  fail<AutogradError>(op, ": its forward changed input ", i, ", of shape ", x.shape(),
                      ", in place, so that the gradient of other uses of it would be wrong; change "
                      "a clone(), or make the op by apply_in_place");
}

const Tensor* source_of(const char* op, const Tensor& y, std::span<const Tensor* const> inputs) {
  LOCKSTEP_CHECK(y.defined(), Error, op, ": its forward returned an undefined tensor");
  TensorBody& body = y.body();
  if (body.untracked_view && body.storage->use_count() == 1) body.untracked_view = false;
  for (const Tensor* x : inputs)
    if (x->defined() &&
        (x->is_same(y) || (body.untracked_view && x->body().storage == body.storage)))
      return x;
  return nullptr;
}

}  // namespace detail

}  // namespace lockstep

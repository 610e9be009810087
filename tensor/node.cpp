#include <lockstep/tensor/node.h>

#include <lockstep/tensor/op.h>

namespace lockstep {
namespace {

thread_local bool grad_enabled = true;
thread_local uint64_t next_sequence = 0;
thread_local OpInterceptor* interceptor = nullptr;

}  // namespace

bool is_grad_enabled() noexcept { return grad_enabled; }
void set_grad_enabled(bool on) noexcept { grad_enabled = on; }

uint64_t next_node_sequence() noexcept { return next_sequence; }

Node::Node() : sequence(next_sequence++) {}

void Node::dispose() noexcept {
  // A chain of nodes would destroy itself one stack frame per link. Instead the first node to go
  // collects those that follow in a list and deletes them one after the other.
  thread_local std::vector<Node*>* doomed = nullptr;
  if (doomed) {
    doomed->push_back(this);
    return;
  }
  std::vector<Node*> list;
  doomed = &list;
  delete this;
  while (!list.empty()) {
    Node* next = list.back();
    list.pop_back();
    delete next;
  }
  doomed = nullptr;
}

Leaf::Leaf(TensorBody* owner) : owner(owner) {
  shape = owner->shape;
  dtype = owner->dtype;
  device = owner->storage->device();
}

void Leaf::accumulate(Tensor g, bool may_take) {
  if (slot.defined()) {
    // The slot's bytes are the gradient; what the caller assigned meanwhile moves in first.
    NoGradGuard guard;
    if (gradient.defined()) {
      if (!gradient.is_same(slot)) slot.copy_(gradient);
      slot.add_(g.detach());
    } else if (!g.is_same(slot)) {
      slot.copy_(g.detach());
    }
    gradient = slot;
    g = Tensor();  // who watches counts the slot's holders
  } else if (!gradient.defined()) {
    gradient = may_take ? std::move(g) : g.clone();
  } else if (is_grad_enabled()) {  // create_graph: both may be parts of a graph
    Tensor sum = gradient.clone();
    sum.add_(g);
    gradient = std::move(sum);
  } else {
    gradient.add_(g);
  }
  accumulated = true;
  if (!post_hooks.empty() && owner) {
    const Tensor self{Ref<TensorBody>(owner)};
    for (auto& [id, hook] : std::vector(post_hooks)) hook(self);
  }
  if (watcher) watcher->leaf_ready(*this);
}

void Leaf::zero_grad(bool set_to_none) {
  accumulated = false;
  if (set_to_none) gradient = Tensor();
  if (!gradient.defined()) return;
  const NoGradGuard guard;
  if (gradient.requires_grad()) gradient = gradient.detach();  // made with create_graph
  gradient.zero_();
}

const Tensor& SavedTensor::unpack(const char* op) const {
  if (!tensor_.defined()) return tensor_;  // an absent input
  LOCKSTEP_CHECK(tensor_.storage().version() == version_, AutogradError, "backward of ", op,
                 ": a tensor of shape ", tensor_.shape(),
                 " that it needs was changed in place since (version ", tensor_.storage().version(),
                 ", expected ", version_, "); use the out-of-place form of that op");
  return tensor_;
}

void Saved::check_alive() const {
  LOCKSTEP_CHECK(!released_, AutogradError, "backward of ", node_.name(),
                 ": its saved tensors were freed by an earlier backward; pass {.retain_graph = "
                 "true} to that one");
}

Tensor Saved::output() const {
  check_alive();
  const Tensor& y = output_.unpack(node_.name());
  if (!is_grad_enabled()) return y;
  Tensor connected = y.detach();
  connected.body().node = Ref<Node>(const_cast<Node*>(&node_));
  return connected;
}

OpInterceptor* set_op_interceptor(OpInterceptor* next) noexcept {
  return std::exchange(interceptor, next);
}

namespace detail {

OpInterceptor* op_interceptor() noexcept { return interceptor; }

void attach(const Tensor& y, Ref<Node> node) {
  node->shape = y.shape();
  node->dtype = y.dtype();
  node->device = y.device();
  TensorBody& body = y.body();
  body.node = std::move(node);
}

}  // namespace detail

}  // namespace lockstep

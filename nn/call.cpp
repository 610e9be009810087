#include <lockstep/nn/call.h>

#include <cstdlib>
#include <unordered_set>

#include <cxxabi.h>

#include <lockstep/nn/registry.h>
#include <lockstep/tensor/node.h>

namespace lockstep::nn {
namespace {

thread_local CallObserver* observer = nullptr;
thread_local detail::CallScope* innermost = nullptr;

std::string class_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return name ? name.get() : type.name();
}

}  // namespace

CallObserver::CallObserver() : outer_(std::exchange(observer, this)) {}
CallObserver::~CallObserver() {
  CallObserver** at = &observer;
  while (*at && *at != this) at = &(*at)->outer_;
  if (*at) *at = outer_;
}

namespace detail {

// ---- classes ----

void check_class(const Module& module) {
  const ModuleType type = module.module_type();
  LOCKSTEP_CHECK(
      typeid(module) == *type.id, Error, class_name(typeid(module)), ": it extends ", type.name,
      " and has no LOCKSTEP_MODULE of its own, so its forward and its members ",
      "would be passed over; add LOCKSTEP_MODULE, with the fields of ", type.name, " too");
}

void check_not_sliced(const char* op, const Module& module, const std::type_info& t) {
  LOCKSTEP_CHECK(typeid(module) == t, Error, op, ": the object is a ", module.module_type().name,
                 " referred to as its base class ", class_name(t),
                 ", and what that does would pass over the subclass; use the object's own type");
}

// ---- the graph of a first call ----

namespace {

/// Nodes of the call have a higher sequence number than this one.
struct Marker final : Node {
  const char* name() const override { return "marker"; }
  void backward(std::span<const Tensor>, InputGradients&) override {}
};

}  // namespace

GraphCheck::GraphCheck() : first_node_(make_ref<Marker>()->sequence) {}

void GraphCheck::check(Module& called, const std::vector<const TensorBody*>& results) {
  std::unordered_set<const TensorBody*> allowed(arguments_.begin(), arguments_.end());
  for_each_module(called, [&](const std::string&, Module&, const Entries& entries) {
    for (auto& [name, p] : entries.parameters) allowed.insert(p->ref().get());
    for (auto& [name, b] : entries.buffers) allowed.insert(b->ref().get());
  });
  const auto check_leaf = [&](const Leaf& leaf) {
    if (leaf.sequence >= first_node_ || !leaf.owner || allowed.contains(leaf.owner)) return;
    const BodyUse use = use_of(leaf.owner);
    if (use.named || (!use.lives && hidden_arguments_)) return;
    const char* type = called.module_type().name;
    fail<Error>(
        type, ": its forward uses a ", use.lives ? "Parameter" : "Tensor", " of shape ", leaf.output().shape,
        " that requires grad and is neither an argument nor in a field that ",
        "LOCKSTEP_MODULE names, so it would not be trained, moved or saved with ", type,
        "; make it an nn::Parameter and name the member that holds it, pass it to forward, ",
        "or detach() it");
  };
  std::unordered_set<const Node*> seen(argument_nodes_.begin(), argument_nodes_.end());
  std::vector<Node*> pending;
  const auto reach = [&](Node* node) {
    if (!node || !seen.insert(node).second) return;
    if (const Leaf* leaf = node->as_leaf())
      check_leaf(*leaf);
    else if (node->sequence >= first_node_)
      pending.push_back(node);
  };
  for (const TensorBody* y : results) reach(y->node.get());
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    for (const Edge& input : node->inputs) reach(input.node.get());
  }
}

// ---- calls ----

CallScope::CallScope(Module& module)
    : module_(module),
      outer_(innermost),
      outermost_(outer_ ? outer_->outermost_ : *this),
      observer_(observer) {
  check_not_moved_from(module);
  if (!outer_) {
    if (is_grad_enabled() && !module.graph_checked_.exchange(true, std::memory_order_relaxed))
      graph_check_ = std::make_unique<GraphCheck>();
  } else {
    if (!module.belongs_.load(std::memory_order_relaxed)) check_belongs();
    if (outermost_.graph_check_) for_each_module(module, {});  // marks its parameters as named
  }
  if (observer_) observer_->enter(module);
  innermost = this;
}

CallScope::~CallScope() {
  innermost = outer_;
  if (graph_check_ && std::uncaught_exceptions() > exceptions_)
    module_.graph_checked_.store(false, std::memory_order_relaxed);  // the next call is checked
  try {
    leave(nullptr);
  } catch (...) {
    // What forward threw is the error to report.
  }
}

void permit_calls(Module& module) { module.belongs_.store(true, std::memory_order_relaxed); }
bool is_observed() { return observer; }

void check_not_moved_from(const Module& module) {
  LOCKSTEP_CHECK(!module.moved_from_, Error, module.module_type().name,
                 ": it was moved into another object and is empty; use that one (the module() of a "
                 "DistributedDataParallel that took it), or wrap it without std::move");
}
void refilled(Module& module) { module.moved_from_ = false; }

bool CallScope::innermost_is(const Module& module) {
  return innermost && &innermost->module_ == &module;
}

void CallScope::leave(const Tensor* result) {
  CallObserver* const entered = std::exchange(observer_, nullptr);
  for (CallObserver* o = observer; o && entered; o = o->outer_)
    if (o == entered) return o->leave(module_, result);
}

void CallScope::check_belongs() const {
  for (const CallScope* call = outer_; call; call = call->outer_) {
    if (&call->module_ == &module_) return;  // recursion
    for_each_module(call->module_, {}, true);
    if (module_.belongs_) return;
  }
  if (module_.parameters().empty()) {
    permit_calls(module_);
    return;
  }
  const char* caller = outer_->module_.module_type().name;
  fail<Error>(
      caller, ": its forward calls a ", module_.module_type().name,
      " that has parameters and is in no field that LOCKSTEP_MODULE names, so it would not ",
      "be trained, moved or saved; add the member that holds it to LOCKSTEP_MODULE(", caller,
      ", ...), or, if another object owns it, as a std::reference_wrapper or through ",
      "nn::external()");
}

}  // namespace detail
}  // namespace lockstep::nn

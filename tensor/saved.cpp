#include <lockstep/tensor/saved.h>

#include <algorithm>

namespace lockstep {
namespace {

using autograd::SavedTensorHooks;

LOCKSTEP_THREAD_LOCAL SavedTensorHooks* innermost = nullptr;

/// What pack returned, and what unpack must return.
struct Packed final : RefCounted {
  std::any value;
  std::shared_ptr<const SavedTensorHooks::Functions> hooks;
  Shape shape;
  Strides strides;
  DType dtype;
  Device device;

  Packed(const Tensor& t, const SavedFrom& from,
         std::shared_ptr<const SavedTensorHooks::Functions> active)
      : hooks(std::move(active)),
        shape(t.shape()),
        strides(t.strides()),
        dtype(t.dtype()),
        device(t.device()) {
    struct Suspended {  // what pack saves goes through no hook
      SavedTensorHooks* before = std::exchange(innermost, nullptr);
      ~Suspended() { innermost = before; }
    } suspended;
    const NoGradGuard guard;
    const uint32_t version = t.storage().version();
    value = hooks->pack(t, from);
    LOCKSTEP_CHECK(t.storage().version() == version, AutogradError, from.op,
                   ": a pack hook of SavedTensorHooks changed ", from,
                   " in place; pack a clone() of it");
  }

  Tensor unpack(const SavedFrom& from) const {
    const Tensor t = hooks->unpack(value);
    const auto what = [&] {
      return str_cat("backward of ", from.op, ": an unpack hook of SavedTensorHooks returned ");
    };
    LOCKSTEP_CHECK(t.defined(), AutogradError, what(), "an undefined tensor for ", from);
    LOCKSTEP_CHECK(t.shape() == shape, ShapeError, what(), "shape ", t.shape(), " for ", from,
                   ", which had shape ", shape);
    LOCKSTEP_CHECK(t.dtype() == dtype, DTypeError, what(), t.dtype(), " for ", from, ", which was ",
                   dtype);
    LOCKSTEP_CHECK(t.device() == device, DeviceError, what(), "a tensor on ", t.device(), " for ",
                   from, ", which was on ", device);
    // Ops read what they save in the memory order that they gave it.
    const NoGradGuard guard;
    return detail::has_strides(t, strides) ? t.detach()
                                           : detail::copy_with_strides(t.detach(), strides);
  }
};

}  // namespace

// ---- hooks ----

SavedTensorHooks::SavedTensorHooks(Functions functions)
    : functions_(std::make_shared<Functions>(std::move(functions))),
      outer_(std::exchange(innermost, this)) {}

SavedTensorHooks::~SavedTensorHooks() {
  SavedTensorHooks** at = &innermost;
  while (*at && *at != this) at = &(*at)->outer_;
  if (*at) *at = outer_;
}

std::shared_ptr<const SavedTensorHooks::Functions> SavedTensorHooks::active() {
  return innermost ? innermost->functions_ : nullptr;
}

void append(std::string& text, const SavedFrom& from) {
  constexpr const char* roles[] = {"input ", "output ", "kept tensor "};
  append(text, roles[from.role]);
  append(text, from.number);
}

// ---- saved tensors ----

SavedTensor::SavedTensor(const Tensor& t, Edge edge, SavedFrom from, bool own)
    : edge_(std::move(edge)), own_(own) {
  if (!t.defined()) return;
  tensor_ = t.detach();
  version_ = t.storage().version();
  if (!innermost) [[likely]]
    return;
  from.is_leaf = edge_ && edge_.node->as_leaf();
  packed_ = make_ref<Packed>(tensor_, from, SavedTensorHooks::active());
  tensor_ = Tensor();
}

Tensor SavedTensor::unpack(const SavedFrom& from, const Node& saver) const {
  Tensor t = tensor_;
  if (packed_) {
    t = static_cast<const Packed&>(*packed_).unpack(from);
  } else if (!t.defined()) {
    return t;  // an absent input
  } else {
    const uint32_t version = t.storage().version();
    LOCKSTEP_CHECK(version == version_, AutogradError, "backward of ", from.op,
                   ": a tensor of shape ", t.shape(),
                   " that it needs was changed in place since (version ", version, ", expected ",
                   version_,
                   "); use the out-of-place form of what changed it, or, if that "
                   "was an optimizer's step or a load, call backward before");
  }
  if (!(edge_ || own_) || !is_grad_enabled()) return t;
  Tensor connected = t.detach();
  connected.body().node = own_ ? Ref<Node>(const_cast<Node*>(&saver)) : edge_.node;
  connected.body().output = edge_.output;
  return connected;
}

void Saver::keep(int i, SavedTensor saved) {
  kept_.resize(std::max(kept_.size(), static_cast<size_t>(i) + 1));
  kept_[static_cast<size_t>(i)] = std::move(saved);
}

void Saver::keep(int i, const Tensor& t) {
  if (records_) keep(i, SavedTensor(t, {}, {op_, SavedFrom::kept, i}));
}

void Saver::keep_connected(int i, const Tensor& t) {
  if (records_)
    keep(i, SavedTensor(t, t.defined() ? edge_of(t) : Edge(), {op_, SavedFrom::kept, i}));
}

void Saver::keep_output(int i, const Tensor& t, int output) {
  if (records_) keep(i, SavedTensor(t, {nullptr, output}, {op_, SavedFrom::kept, i}, true));
}

void Saver::mark_non_differentiable(int output) {
  constant_.resize(std::max(constant_.size(), static_cast<size_t>(output) + 1));
  constant_[static_cast<size_t>(output)] = true;
}

void Saved::check_alive() const {
  LOCKSTEP_CHECK(!released_, AutogradError, "backward of ", node_.name(),
                 ": its saved tensors were freed by an earlier backward; pass {.retain_graph = "
                 "true} to that one");
}

Tensor Saved::input(int i) const {
  check_alive();
  const auto at = static_cast<size_t>(i);
  LOCKSTEP_CHECK(i >= 0 && at < inputs_.size() && detail::saves_input(saves_, at), AutogradError,
                 "backward of ", node_.name(), ": it reads input ", i,
                 ", which `saves` (or saves_for) does not name; add kInput(", i, ")");
  return inputs_[at].unpack({node_.name(), SavedFrom::input, i}, node_);
}

Tensor Saved::output(int i) const {
  check_alive();
  const auto at = static_cast<size_t>(i);
  LOCKSTEP_CHECK(i >= 0 && at < outputs_.size() && detail::saves_output(saves_, at), AutogradError,
                 "backward of ", node_.name(), ": it reads ",
                 node_.outputs() == 1 ? "the output" : str_cat("output ", i),
                 ", which `saves` (or saves_for) does not name; add kOutput",
                 i > 0 ? str_cat(" << ", i) : "");
  return outputs_[at].unpack({node_.name(), SavedFrom::output, i}, node_);
}

Tensor Saved::kept(int i) const {
  check_alive();
  LOCKSTEP_CHECK(i >= 0 && static_cast<size_t>(i) < kept_.size(), AutogradError, "backward of ",
                 node_.name(), ": its forward kept ", kept_.size(), " tensors, and none as number ",
                 i, "; see Saver::keep");
  return kept_[static_cast<size_t>(i)].unpack({node_.name(), SavedFrom::kept, i}, node_);
}

}  // namespace lockstep

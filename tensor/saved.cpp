#include <lockstep/tensor/saved.h>

#include <algorithm>

namespace lockstep {

void append(std::string& text, const SavedFrom& from) {
  constexpr const char* roles[] = {"input ", "output ", "kept tensor "};
  append(text, roles[from.role]);
  append(text, from.number);
}

SavedTensor::SavedTensor(const Tensor& t, Edge edge, const SavedFrom&) : edge_(std::move(edge)) {
  if (!t.defined()) return;
  tensor_ = t.detach();
  version_ = t.storage().version();
}

Tensor SavedTensor::unpack(const SavedFrom& from) const {
  if (!tensor_.defined()) return tensor_;  // an absent input
  LOCKSTEP_CHECK(tensor_.storage().version() == version_, AutogradError, "backward of ", from.op,
                 ": a tensor of shape ", tensor_.shape(),
                 " that it needs was changed in place since (version ", tensor_.storage().version(),
                 ", expected ", version_,
                 "); use the out-of-place form of what changed it, or, if that "
                 "was an optimizer's step or a load, call backward before");
  if (!edge_ || !is_grad_enabled()) return tensor_;
  Tensor connected = tensor_.detach();
  connected.body().node = edge_.node;
  connected.body().output = edge_.output;
  return connected;
}

void Saver::keep(int i, const Tensor& t) {
  if (!records_) return;
  kept_.resize(std::max(kept_.size(), static_cast<size_t>(i) + 1));
  kept_[static_cast<size_t>(i)] = SavedTensor(t, {}, {op_, SavedFrom::kept, i});
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
  return inputs_[at].unpack({node_.name(), SavedFrom::input, i});
}

Tensor Saved::output(int i) const {
  check_alive();
  const auto at = static_cast<size_t>(i);
  LOCKSTEP_CHECK(i >= 0 && at < outputs_.size() && detail::saves_output(saves_, at), AutogradError,
                 "backward of ", node_.name(), ": it reads ",
                 node_.outputs() == 1 ? "the output" : str_cat("output ", i),
                 ", which `saves` (or saves_for) does not name; add kOutput",
                 i > 0 ? str_cat(" << ", i) : "");
  Tensor y = outputs_[at].unpack({node_.name(), SavedFrom::output, i});
  if (!is_grad_enabled()) return y;
  y = y.detach();
  y.body().node = Ref<Node>(const_cast<Node*>(&node_));
  y.body().output = i;
  return y;
}

Tensor Saved::kept(int i) const {
  check_alive();
  LOCKSTEP_CHECK(i >= 0 && static_cast<size_t>(i) < kept_.size(), AutogradError, "backward of ",
                 node_.name(), ": its forward kept ", kept_.size(), " tensors, and none as number ",
                 i, "; see Saver::keep");
  return kept_[static_cast<size_t>(i)].unpack({node_.name(), SavedFrom::kept, i});
}

}  // namespace lockstep

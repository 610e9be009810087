// SharedGroup: from tensors to calls.
#include <lockstep/distributed/shared_group.h>

#include <lockstep/distributed/communicator.h>
#include <lockstep/distributed/reduce.h>

namespace lockstep::dist {

namespace {

Call call_of(CallKind kind, const Tensor& t) {
  Call call{.kind = kind, .dtype = t.dtype(), .dims = t.dim()};
  for (int i = 0; i < t.dim(); ++i) call.shape[i] = t.shape()[i];
  return call;
}

}  // namespace

size_t SharedGroup::bytes_for(int size) {
  return Peers::seats_bytes(size) + SharedArea::bytes_for(size);
}

SharedGroup::SharedGroup(std::string_view backend, std::unique_ptr<Peers> peers,
                         Milliseconds timeout)
    : backend_(backend) {
  SharedArea area(peers->first(), Peers::seats_bytes(peers->size()), peers->size());
  auto engine = std::make_shared<Engine>(std::move(peers));
  communicator_ = std::make_shared<Communicator>(std::move(engine), std::move(area), 1, timeout);
}

SharedGroup::SharedGroup(std::string_view backend, std::shared_ptr<Communicator> communicator)
    : backend_(backend), communicator_(std::move(communicator)) {}

SharedGroup::~SharedGroup() {
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_birth_;
  if (unwinding && communicator_->engine().peers().first()->is_here() &&
      !communicator_->destroyed())
    communicator_->abort("it was left by an exception");
  communicator_->destroy();
}

int SharedGroup::rank() const { return communicator_->rank(); }
int SharedGroup::size() const { return communicator_->size(); }

WorkPtr SharedGroup::start(Collective c) {
  if (c.kind == CollectiveKind::barrier) return communicator_->issue({}, {}, {}, {}, c.options);
  const Tensor& model = c.model();
  LOCKSTEP_CHECK(model.device().is_cpu(), DeviceError, name_of(c.kind),
                 ": this group works on CPU tensors, got one on ", model.device(),
                 "; move it with to(Device{})");
  Call call = call_of(CallKind::barrier, model);
  call.root = c.root;
  call.reduce = c.reduce;
  std::vector<Tensor> keep = c.inputs;
  keep.insert(keep.end(), c.outputs.begin(), c.outputs.end());
  const Tensor source = c.inputs.empty() ? Tensor() : c.inputs[0];
  if (c.kind == CollectiveKind::all_reduce)
    call.kind = CallKind::all_reduce;
  else if (c.kind == CollectiveKind::broadcast)
    call.kind = CallKind::broadcast;
  else if (c.kind == CollectiveKind::all_gather)
    call.kind = CallKind::all_gather;
  else
    fail<DistError>(name_of(c.kind), ": backend ", backend_, " has no such collective yet");
  return communicator_->issue(call, std::move(keep), source, c.outputs, c.options);
}

std::shared_ptr<ProcessGroup> SharedGroup::new_group(const std::vector<int>&) {
  fail<DistError>("new_group: backend ", backend_, " has no groups of some ranks yet");
}

std::shared_ptr<ProcessGroup> SharedGroup::child() {
  return std::shared_ptr<ProcessGroup>(new SharedGroup(backend_, communicator_->child()));
}
Ref<Storage> SharedGroup::allocate(size_t bytes) { return communicator_->allocate(bytes); }
void SharedGroup::post(uint64_t epoch, std::span<const std::byte> record) {
  communicator_->post(epoch, record);
}
std::vector<std::vector<std::byte>> SharedGroup::collect(uint64_t epoch) {
  return communicator_->collect(epoch);
}
void SharedGroup::progress() { communicator_->engine().progress(); }
void SharedGroup::abort(const std::string& text) { communicator_->abort(text); }
void SharedGroup::destroy() { communicator_->destroy(); }

}  // namespace lockstep::dist

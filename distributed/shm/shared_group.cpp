// SharedGroup hands on to its communicator.
#include <lockstep/distributed/shm/shared_group.h>

#include <lockstep/distributed/shm/communicator.h>

namespace lockstep::dist {

size_t SharedGroup::bytes_for(int size) {
  return Peers::slots_bytes(size) + SharedArea::bytes_for(size);
}

SharedGroup::SharedGroup(std::string_view backend, std::unique_ptr<Peers> peers,
                         Milliseconds timeout)
    : backend_(backend) {
  SharedArea area(peers->first(), Peers::slots_bytes(peers->size()), peers->size());
  auto engine = std::make_shared<Engine>(std::move(peers));
  std::vector<int> all;
  for (int r = 0; r < engine->peers().size(); ++r) all.push_back(r);
  communicator_ = std::make_shared<Communicator>(std::move(engine), std::move(area), std::move(all),
                                                 1, "the group of all ranks", bounded(timeout));
}

SharedGroup::SharedGroup(std::string_view backend, std::shared_ptr<Communicator> communicator)
    : backend_(backend), communicator_(std::move(communicator)) {}

SharedGroup::~SharedGroup() {
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_birth_;
  if (unwinding) communicator_->abort("it was left by an exception" + failure_text());
  communicator_->destroy();
}

int SharedGroup::rank() const { return communicator_->rank(); }
int SharedGroup::size() const { return communicator_->size(); }

WorkPtr SharedGroup::start(Collective c) {
  const Tensor& model = c.model();
  LOCKSTEP_CHECK(!model.defined() || model.device().is_cpu(), DeviceError, name_of(c.kind),
                 ": this group works on CPU tensors, got one on ", model.device(),
                 "; move it with to(Device{})");
  return communicator_->start(std::move(c));
}

std::shared_ptr<ProcessGroup> SharedGroup::new_group(const std::vector<int>& ranks) {
  auto communicator = communicator_->new_group(ranks);
  if (!communicator) return nullptr;
  return std::shared_ptr<ProcessGroup>(new SharedGroup(backend_, std::move(communicator)));
}

std::shared_ptr<ProcessGroup> SharedGroup::child() {
  return children_.add(
      std::shared_ptr<ProcessGroup>(new SharedGroup(backend_, communicator_->child())));
}
Ref<Storage> SharedGroup::allocate(size_t bytes) { return communicator_->allocate(bytes); }
void SharedGroup::post(uint64_t epoch, std::span<const std::byte> record) {
  communicator_->post(epoch, record);
}
std::vector<std::vector<std::byte>> SharedGroup::collect(uint64_t epoch) {
  return communicator_->collect(epoch);
}
void SharedGroup::note(std::string_view text) { communicator_->note(text); }
void SharedGroup::progress() {
  communicator_->check_here("progress");
  communicator_->engine().progress();
}
void SharedGroup::abort(const std::string& text) { communicator_->abort(text); }
void SharedGroup::destroy() {
  if (!communicator_->engine().is_here()) return;
  children_.destroy();
  communicator_->destroy();
}

}  // namespace lockstep::dist

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

void check_place(std::string_view op, const Tensor& t) {
  LOCKSTEP_CHECK(t.device().is_cpu(), DeviceError, op,
                 ": this group works on CPU tensors, got one on ", t.device(),
                 "; move it with to(Device{})");
}

// A tensor that will be written: saved copies of it notice.
void prepare_target(std::string_view op, const Tensor& t) {
  check_place(op, t);
  LOCKSTEP_CHECK(!has_overlap(t), ValueError, op,
                 ": cannot write a tensor whose elements share memory, shape ", t.shape(),
                 ", strides ", t.strides(), "; pass contiguous() of it");
  t.storage().bump_version();
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

WorkPtr SharedGroup::all_reduce(Tensor t, ReduceOp op, CollectiveOptions options) {
  check_reducible(op, t.dtype());
  prepare_target("all_reduce", t);
  Call call = call_of(CallKind::all_reduce, t);
  call.reduce = op;
  return communicator_->issue(call, {t}, t, {t}, options);
}

WorkPtr SharedGroup::broadcast(Tensor t, int root, CollectiveOptions options) {
  LOCKSTEP_CHECK(root >= 0 && root < size(), ValueError,
                 "broadcast: the root must be a rank of 0 .. ", size() - 1, ", got ", root);
  if (rank() == root)
    check_place("broadcast", t);
  else
    prepare_target("broadcast", t);
  Call call = call_of(CallKind::broadcast, t);
  call.root = root;
  return communicator_->issue(call, {t}, rank() == root ? t : Tensor(), {t}, options);
}

WorkPtr SharedGroup::all_gather(Tensor output, Tensor input, CollectiveOptions options) {
  check_place("all_gather", input);
  Shape expected = input.shape();
  expected.insert(0, size());
  LOCKSTEP_CHECK(output.shape() == expected, ShapeError, "all_gather: the output must be ",
                 expected, " (the number of ranks, then the input's shape), got ", output.shape());
  LOCKSTEP_CHECK(output.dtype() == input.dtype(), DTypeError,
                 "all_gather: the output must have the input's dtype ", input.dtype(), ", got ",
                 output.dtype());
  prepare_target("all_gather", output);
  std::vector<Tensor> parts;
  for (int r = 0; r < size(); ++r) parts.push_back(output.detach().select(0, r));
  return communicator_->issue(call_of(CallKind::all_gather, input), {output, input}, input, parts,
                              options);
}

WorkPtr SharedGroup::barrier(CollectiveOptions options) {
  return communicator_->issue({}, {}, {}, {}, options);
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

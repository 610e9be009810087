// SingleGroup: the checks of the real groups, and nothing to do.
#include <lockstep/distributed/single_group.h>

#include <lockstep/distributed/reduce.h>

namespace lockstep::dist {

namespace {
class Done final : public Work {
 public:
  explicit Done(uint64_t sequence) : sequence_(sequence) {}
  void wait() override { run_then(); }
  bool is_completed() override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  uint64_t sequence_number() const override { return sequence_; }

 private:
  uint64_t sequence_;
};
}  // namespace

WorkPtr SingleGroup::done(std::string_view op) {
  LOCKSTEP_CHECK(end_.empty(), DistError, op, ": ", end_);
  return std::make_shared<Done>(++sequence_);
}

WorkPtr SingleGroup::all_reduce(Tensor t, ReduceOp op, CollectiveOptions) {
  check_reducible(op, t.dtype());
  return done("all_reduce");
}

WorkPtr SingleGroup::broadcast(Tensor t, int root, CollectiveOptions) {
  (void)t.body();
  LOCKSTEP_CHECK(root == 0, ValueError, "broadcast: the root must be a rank of 0 .. 0, got ", root);
  return done("broadcast");
}

WorkPtr SingleGroup::all_gather(Tensor output, Tensor input, CollectiveOptions) {
  Shape expected = input.shape();
  expected.insert(0, 1);
  LOCKSTEP_CHECK(output.shape() == expected, ShapeError, "all_gather: the output must be ",
                 expected, " (the number of ranks, then the input's shape), got ", output.shape());
  LOCKSTEP_CHECK(output.dtype() == input.dtype(), DTypeError,
                 "all_gather: the output must have the input's dtype ", input.dtype(), ", got ",
                 output.dtype());
  WorkPtr work = done("all_gather");
  output.detach().select(0, 0).copy_(input.detach());
  return work;
}

WorkPtr SingleGroup::barrier(CollectiveOptions) { return done("barrier"); }

std::shared_ptr<ProcessGroup> SingleGroup::child() {
  done("child");
  return std::make_shared<SingleGroup>();
}

Ref<Storage> SingleGroup::allocate(size_t bytes) {
  done("allocate");
  return Storage::allocate(bytes, Device{});
}

void SingleGroup::post(uint64_t epoch, std::span<const std::byte> record) {
  LOCKSTEP_CHECK(record.size() <= 4096, ValueError,
                 "post: a record has at most 4096 bytes, this one has ", record.size());
  epoch_ = epoch;
  record_.assign(record.begin(), record.end());
}

std::vector<std::vector<std::byte>> SingleGroup::collect(uint64_t epoch) {
  LOCKSTEP_CHECK(epoch == epoch_, ValueError, "collect: epoch ", epoch,
                 " was not posted here before");
  return {record_};
}

void SingleGroup::abort(const std::string& text) { end_ = str_cat("aborted by rank 0: ", text); }

}  // namespace lockstep::dist

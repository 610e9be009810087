// SingleGroup: every collective hands this rank's input to its own output.
#include <lockstep/distributed/single_group.h>

namespace lockstep::dist {

namespace {
class Done final : public Work {
 public:
  Done(uint64_t sequence, std::vector<Tensor> outputs)
      : sequence_(sequence), outputs_(std::move(outputs)) {}
  void wait(Milliseconds) override { run_then(); }
  bool is_completed() override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  uint64_t sequence_number() const override { return sequence_; }
  std::vector<Tensor> result() const override { return outputs_; }

 private:
  uint64_t sequence_;
  std::vector<Tensor> outputs_;
};
}  // namespace

WorkPtr SingleGroup::start(Collective call) {
  LOCKSTEP_CHECK(end_.empty(), DistError, name_of(call.kind), ": ", end_);
  for (size_t i = 0; i < call.outputs.size() && i < call.inputs.size(); ++i)
    if (!call.outputs[i].is_same(call.inputs[i]))
      call.outputs[i].detach().copy_(call.inputs[i].detach().reshape(call.outputs[i].shape()));
  if (call.deliver) call.deliver();
  return std::make_shared<Done>(++sequence_, std::move(call.outputs));
}

std::shared_ptr<ProcessGroup> SingleGroup::child() {
  LOCKSTEP_CHECK(end_.empty(), DistError, "child: ", end_);
  return children_.add(std::make_shared<SingleGroup>());
}

std::shared_ptr<ProcessGroup> SingleGroup::new_group(const std::vector<int>& ranks) {
  LOCKSTEP_CHECK(ranks.empty() || ranks == std::vector<int>{0}, ValueError,
                 "new_group: this group has rank 0 alone");
  LOCKSTEP_CHECK(end_.empty(), DistError, "new_group: ", end_);
  return ranks.empty() ? nullptr : std::make_shared<SingleGroup>();
}

void SingleGroup::abort(const std::string& text) { end_ = str_cat("aborted by rank 0: ", text); }

}  // namespace lockstep::dist

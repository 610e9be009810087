// SingleGroup: the group of one rank. Every collective is complete when it is called, so programs
// need no case of their own for one rank.
#pragma once

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

class LOCKSTEP_API SingleGroup final : public ProcessGroup {
 public:
  std::string_view backend() const override { return "single"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  WorkPtr all_reduce(Tensor t, ReduceOp op, CollectiveOptions options) override;
  WorkPtr broadcast(Tensor t, int root, CollectiveOptions options) override;
  WorkPtr all_gather(Tensor output, Tensor input, CollectiveOptions options) override;
  WorkPtr barrier(CollectiveOptions options) override;
  std::shared_ptr<ProcessGroup> child() override;
  Ref<Storage> allocate(size_t bytes) override;
  void post(uint64_t epoch, std::span<const std::byte> record) override;
  std::vector<std::vector<std::byte>> collect(uint64_t epoch) override;
  void progress() override {}
  void abort(const std::string& text) override;
  void destroy() override { end_ = "the group was destroyed on this rank"; }

 private:
  WorkPtr done(std::string_view op);

  std::string end_;  // why nothing works any more
  uint64_t sequence_ = 0;
  uint64_t epoch_ = 0;
  std::vector<std::byte> record_;
};

}  // namespace lockstep::dist

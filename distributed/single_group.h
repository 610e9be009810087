// SingleGroup: the group of one rank. Every collective is complete when it is called, so programs
// need no special case for one rank.
#pragma once

#include <lockstep/distributed/children.h>

namespace lockstep::dist {

class LOCKSTEP_API SingleGroup final : public ProcessGroup {
 public:
  std::string_view backend() const override { return "single"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  WorkPtr start(Collective call) override;
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) override;
  std::shared_ptr<ProcessGroup> child() override;
  void abort(const std::string& text) override;
  void destroy() override {
    children_.destroy();
    end_ = "the group was destroyed on this rank";
  }

 private:
  std::string end_;  // why nothing works any more
  uint64_t sequence_ = 0;
  Children children_;
};

}  // namespace lockstep::dist

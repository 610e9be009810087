// WrappedGroup: a process group that forwards everything to another one. Tests derive from it to
// count what DDP does, or to plant a fault and see that it is noticed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

class WrappedGroup : public ProcessGroup {
 public:
  explicit WrappedGroup(std::shared_ptr<ProcessGroup> inner) : inner_(std::move(inner)) {}
  std::string_view backend() const override { return inner_->backend(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  WorkPtr start(Collective call) override { return inner_->start(std::move(call)); }
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) override {
    return inner_->new_group(ranks);
  }
  std::shared_ptr<ProcessGroup> child() override { return inner_->child(); }
  Ref<Storage> allocate(size_t bytes) override { return inner_->allocate(bytes); }
  void post(uint64_t epoch, std::span<const std::byte> record) override {
    inner_->post(epoch, record);
  }
  std::vector<std::vector<std::byte>> collect(uint64_t epoch) override {
    return inner_->collect(epoch);
  }
  bool records_are_free() const override { return inner_->records_are_free(); }
  void note(std::string_view text) override { inner_->note(text); }
  void progress() override { inner_->progress(); }
  void abort(const std::string& text) override { inner_->abort(text); }
  void destroy() override { inner_->destroy(); }

 protected:
  std::shared_ptr<ProcessGroup> inner_;
};

}  // namespace lockstep::dist

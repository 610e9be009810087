// SharedGroup: the ProcessGroup of ranks that share memory, processes ("shm") or threads ("local")
// alike. The work is the Communicator's.
#pragma once

#include <lockstep/distributed/children.h>
#include <lockstep/distributed/shm/peers.h>

namespace lockstep::dist {

class Communicator;

class LOCKSTEP_API SharedGroup final : public ProcessGroup {
 public:
  /// The first group on the memory of a meeting: one slot per rank, then a communicator's area.
  SharedGroup(std::string_view backend, std::unique_ptr<Peers> peers, Milliseconds timeout);
  /// How much memory a meeting of `size` ranks needs.
  static size_t bytes_for(int size);
  /// Completes outstanding work and says goodbye; aborts instead while an exception unwinds the
  /// stack.
  ~SharedGroup() override;

  std::string_view backend() const override { return backend_; }
  int rank() const override;
  int size() const override;
  WorkPtr start(Collective call) override;
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) override;

  std::shared_ptr<ProcessGroup> child() override;
  Ref<Storage> allocate(size_t bytes) override;
  void post(uint64_t epoch, std::span<const std::byte> record) override;
  std::vector<std::vector<std::byte>> collect(uint64_t epoch) override;
  bool records_are_free() const override { return true; }
  void note(std::string_view text) override;
  void progress() override;
  void abort(const std::string& text) override;
  void destroy() override;

 private:
  SharedGroup(std::string_view backend, std::shared_ptr<Communicator> communicator);

  std::string_view backend_;
  std::shared_ptr<Communicator> communicator_;
  Children children_;
  int exceptions_at_birth_ = std::uncaught_exceptions();
};

}  // namespace lockstep::dist

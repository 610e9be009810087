// Communicator: one rank's side of a shared area: the operations under way, in the order they were
// called, the memory it handed out, and what to say when one cannot complete.
#pragma once

#include <deque>

#include <lockstep/distributed/allocations.h>
#include <lockstep/distributed/engine.h>
#include <lockstep/distributed/operation.h>

namespace lockstep::dist {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// `id` is the same on all ranks and names the memory that they hand each other.
  Communicator(std::shared_ptr<Engine> engine, SharedArea area, uint64_t id, Milliseconds timeout);
  ~Communicator();

  int rank() const { return engine_->peers().rank(); }
  int size() const { return engine_->peers().size(); }
  Engine& engine() const { return *engine_; }
  const SharedArea& area() const { return area_; }
  const Allocations& allocations() const { return allocations_; }
  Milliseconds timeout() const { return timeout_; }

  /// Starts the next collective. `source` is offered, `targets` are written (all_gather: one per
  /// rank). Throws DistError when the communicator has failed or was destroyed.
  WorkPtr issue(Call call, std::vector<Tensor> tensors, const Tensor& source,
                const std::vector<Tensor>& targets, const CollectiveOptions& options);
  std::shared_ptr<Communicator> child();
  Ref<Storage> allocate(size_t bytes);
  void post(uint64_t epoch, std::span<const std::byte> record);
  std::vector<std::vector<std::byte>> collect(uint64_t epoch);
  void abort(const std::string& text);
  /// Completes what is under way (or lets it fail) and says goodbye. Never throws.
  void destroy() noexcept;
  bool destroyed() const { return destroyed_; }

  // ---- with the engine's mutex held ----

  /// Moves all operations; those that are over are appended to `finished`.
  bool advance(std::vector<std::shared_ptr<Operation>>& finished);
  /// Looks for deadlines that have passed and peers that are gone.
  void inspect(Clock::time_point now);
  Clock::time_point earliest_deadline() const;
  /// Makes every operation on every rank fail with `text`.
  void poison(const std::string& text);

 private:
  bool usable() const { return !destroyed_ && !area_.poisoned(); }
  [[noreturn]] void refuse(std::string_view what) const;
  /// Why nothing more can come from a rank; empty while it lives.
  std::string absence(int rank) const;
  std::shared_ptr<Segment> share(size_t bytes, std::string_view what);

  std::shared_ptr<Engine> engine_;
  SharedArea area_;
  uint64_t id_;
  Milliseconds timeout_;
  Allocations allocations_;
  std::deque<std::shared_ptr<Operation>> operations_;
  uint64_t sequence_ = 0;
  uint64_t bases_[kLanes] = {}, reduce_bases_[kLanes] = {};
  uint64_t shares_ = 0, children_ = 0;
  uint64_t posted_ = 0, collected_ = 0;  // the next epoch + 1 after it; 0 before the first
  NamedCall last_completed_;
  bool destroyed_ = false;
};

}  // namespace lockstep::dist

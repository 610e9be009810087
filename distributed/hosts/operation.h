// HostOperation: a collective over several hosts as three stages: *gather* (a reduction or gather
// within each host), *cross* (the same between one leader per host) and *spread* (a broadcast
// within each host). Nothing here has a thread; whoever waits or asks advances all operations of
// the rank, of all its groups. Stages of one sort start in the order of the operations, so every
// rank starts the same ones in the same order.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/peer_error.h>
#include <lockstep/distributed/process_group.h>
#include <lockstep/distributed/store/wait_board.h>

namespace lockstep::dist {

/// How much longer than the operation's own time a later stage may take: the reason why an earlier
/// one failed, elsewhere, must get here first.
inline constexpr Milliseconds kCrossGrace{500}, kSpreadGrace{6000};

/// What an operation does, on this rank. A stage without a function is nothing here.
struct HostPlan {
  std::function<WorkPtr()> gather, cross, spread;
  std::function<void()> finish;  // with the result: into the outputs
};

class HostEngine;

class HostOperation final : public Work {
 public:
  HostOperation(std::shared_ptr<HostEngine> engine, HostPlan plan, Collective call,
                uint64_t sequence, Milliseconds timeout);
  void wait(Milliseconds timeout) override;
  bool is_completed() override;
  std::exception_ptr exception() const override;
  uint64_t sequence_number() const override { return sequence_; }
  std::vector<Tensor> result() const override { return outputs_; }
  /// "all_reduce(sum) of f32 [10], sequence number 5 (label)"
  std::string text() const;

 private:
  friend class HostEngine;
  struct Stage {
    bool started = false, done = false;
    WorkPtr work;
    /// Whether it is done; throws what its work failed with.
    bool look();
  };
  void forget();

  std::shared_ptr<HostEngine> engine_;
  HostPlan plan_;
  Collective call_;
  std::vector<Tensor> outputs_;
  uint64_t sequence_;
  Clock::time_point deadline_;
  Stage gather_, cross_, spread_;
  bool over_ = false;
  std::exception_ptr error_;
};

/// The operations under way of one group, and its end.
class HostEngine {
 public:
  /// What an engine asks of its group.
  struct Group {
    std::shared_ptr<Store> store;
    std::string name;        // the prefix of its keys in the store
    std::vector<int> ranks;  // the job's ranks
    /// Tells the other ranks of an end; gets what it is, and whether it counts ranks within this
    /// host, and returns what stands.
    std::function<Ending(Ending, bool within_host)> tell;
  };
  static std::shared_ptr<HostEngine> make(Group group);

  bool is_here() const { return origin_.is_here(); }
  void check_here(std::string_view what) const { dist::check_here(origin_, what); }

  void issue(const std::shared_ptr<HostOperation>& operation);
  /// Does what can be done without waiting, for all groups of this rank.
  void advance();
  /// Blocks until this operation is over, or its own deadline.
  /// Until `deadline`, which is the operation's own or earlier; one with a timeout of its own is part
  /// of no deadlock.
  void wait_for(HostOperation& operation, Clock::time_point deadline, bool has_timeout);
  /// Completes everything.
  void flush() noexcept;
  /// All operations fail, now and later.
  void fail(const Ending& why, bool within_host = false);
  Ending end() const;

 private:
  friend class HostOperation;
  void advance_locked();
  void fail_by(const std::exception& error, bool within_host);
  BlockedCall blocked_in(const HostOperation& operation) const;

  explicit HostEngine(Group group) : group_(std::move(group)) {}

  const Origin origin_;
  Group group_;
  mutable std::recursive_mutex mutex_;
  std::deque<std::shared_ptr<HostOperation>> operations_;
  Ending end_;
  std::string last_completed_ = "nothing";
};

}  // namespace lockstep::dist

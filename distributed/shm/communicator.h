// Communicator: one rank's side of a shared area: the operations under way, in the order they were
// called, the memory it handed out, and what to say when one cannot complete. Its ranks are some or
// all of the engine's peers, in an order of their own.
#pragma once

#include <deque>

#include <lockstep/distributed/shm/allocations.h>
#include <lockstep/distributed/shm/engine.h>
#include <lockstep/distributed/shm/operation.h>
#include <lockstep/distributed/shm/transfer.h>

namespace lockstep::dist {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// `members` are peers, by rank, and this one among them. `id` is the same on all of them and
  /// names the memory that they hand each other; `name` is for messages.
  Communicator(std::shared_ptr<Engine> engine, SharedArea area, std::vector<int> members,
               uint64_t id, std::string name, Milliseconds timeout);
  ~Communicator();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  Engine& engine() const { return *engine_; }
  const SharedArea& area() const { return area_; }
  const Allocations& allocations() const { return allocations_; }
  Milliseconds timeout() const { return timeout_; }

  /// Starts a collective, a send or a receive. Throws DistError when the communicator has failed or
  /// was destroyed.
  WorkPtr start(Collective c) {
    const Call call = Call::of(c);
    return issue(call, std::move(c));
  }
  std::shared_ptr<Communicator> child();
  /// Null on the ranks that are not among `ranks`.
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks);
  Ref<Storage> allocate(size_t bytes);
  void post(uint64_t epoch, std::span<const std::byte> record);
  std::vector<std::vector<std::byte>> collect(uint64_t epoch);
  void note(std::string_view text) const;
  void abort(const std::string& text);
  /// Completes what is under way (or lets it fail) and says goodbye. Never throws.
  void destroy() noexcept;
  /// Throws DistError in a forked child.
  void check_here(std::string_view what) const;
  /// Waits until done() is true; a deadlock ends this communicator.
  void wait_for(const std::function<bool()>& done, const std::function<Obstacle()>& obstacle,
                const std::function<void()>& look = {});

  // ---- with the engine's mutex held ----

  /// Moves all operations; those that are over are appended to `finished`.
  bool advance(std::vector<std::shared_ptr<Operation>>& finished);
  /// Looks for deadlines that have passed and peers that are gone.
  void inspect(Clock::time_point now);
  Clock::time_point earliest_deadline() const;
  /// Makes every operation on every rank fail with this.
  void poison(const Ending& why);
  /// What a call waits for when these of its ranks have not made it.
  Obstacle obstacle(const std::string& call, const std::vector<int>& missing) const;
  /// This rank's sends to, or its receives from, the rank that a call names.
  TransferCounts& transfers(const Call& call);
  /// Makes `sender` the one that fills the outbox, if nobody else does.
  bool take_outbox(const Operation* sender);
  void leave_outbox() { outbox_ = nullptr; }
  /// "rank 1 last completed barrier, sequence number 7".
  std::string standing(int rank) const;

 private:
  WorkPtr issue(Call call, Collective what);
  void place(Call& call, const Collective& what);
  bool usable() const { return !destroyed_ && !area_.poisoned(); }
  [[noreturn]] void refuse(std::string_view what) const;
  void wake_others() const;
  /// Why nothing more can come from a rank; its text is empty while it lives.
  Ending absence(int rank) const;
  /// Poisons for a rank that is late or gone: with what the ranks' notes say.
  void give_up(Ending why);
  std::shared_ptr<Segment> share(const std::vector<int>& peers, size_t bytes,
                                 std::string_view what);
  std::shared_ptr<Communicator> form(const std::vector<int>& ranks, std::string_view what,
                                     std::string name);
  void agree_on(const std::vector<int>& ranks);

  std::shared_ptr<Engine> engine_;
  SharedArea area_;
  std::vector<int> members_;  // peers, by rank
  int rank_;
  uint64_t id_;
  std::string name_;
  Milliseconds timeout_;
  Allocations allocations_;
  std::deque<std::shared_ptr<Operation>> operations_;
  uint64_t sequence_ = 0;                         // of collectives
  std::vector<TransferCounts> sends_, receives_;  // by the other rank
  const Operation* outbox_ = nullptr;             // whoever fills it
  uint64_t shares_ = 0, children_ = 0;
  uint64_t posted_ = 0, collected_ = 0;  // the next epoch + 1 after it; 0 before the first
  NamedCall last_completed_;
  std::atomic<bool> destroyed_{false};
};

}  // namespace lockstep::dist

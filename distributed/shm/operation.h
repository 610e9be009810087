// Operation: something under way on shared memory, as one rank sees it: its state, its deadline,
// its error. An Exchange is one of all ranks, a Transfer one between two. Whoever polls the engine
// calls advance(), which does what can be done now and never waits.
#pragma once

#include <atomic>

#include <lockstep/distributed/shm/call.h>
#include <lockstep/distributed/shm/engine.h>
#include <lockstep/distributed/shm/shared_area.h>
#include <lockstep/distributed/strided.h>

namespace lockstep::dist {

class Operation : public Work {
 public:
  Operation(std::shared_ptr<Communicator> communicator, const Call& call, Collective what);

  void wait(Milliseconds timeout) override;
  std::vector<Tensor> result() const override { return what_.outputs; }
  bool is_completed() override;
  std::exception_ptr exception() const override { return failed() ? error_ : nullptr; }
  uint64_t sequence_number() const override { return call_.sequence; }

  bool over() const { return state_.load(std::memory_order_acquire) >= State::complete; }
  bool failed() const { return state_.load(std::memory_order_acquire) == State::failed; }

  // ---- for the communicator, with the engine's mutex held ----

  /// Does what can be done now; true if something moved.
  virtual bool advance() = 0;
  /// Whether it still cannot complete without this rank.
  virtual bool needs(int rank) const = 0;
  /// The ranks that have not called their side of it.
  virtual std::vector<int> missing() const = 0;
  /// The ranks that have not even called it, whatever it waits for.
  virtual std::vector<int> not_called() const = 0;
  /// Where all have: those that hold the others up.
  virtual std::vector<int> lagging() const { return {}; }
  void fail(const Ending& why);
  /// The inputs of one that is over. They are dropped without the engine's mutex: what a tensor's
  /// release function does is the user's.
  std::vector<Tensor> take_inputs() { return std::exchange(what_.inputs, {}); }
  NamedCall named() const { return {call_, what_.options.label}; }
  Clock::time_point deadline() const { return deadline_; }
  /// What went wrong when the deadline passed.
  std::string deadline_text() const;
  /// What it waits for.
  Obstacle obstacle() const;

 protected:
  enum class State : int { queued, published, agreed, complete, failed };

  static uint64_t chunks_of(int64_t elements, int64_t chunk_elements) {
    return static_cast<uint64_t>((elements + chunk_elements - 1) / chunk_elements);
  }
  const SharedArea& area() const;
  State state() const { return state_.load(std::memory_order_relaxed); }
  void enter(State state) { state_.store(state, std::memory_order_release); }
  void complete();

  std::shared_ptr<Communicator> communicator_;
  int rank_, size_;
  Call call_;
  Collective what_;  // keeps the tensors alive
  int64_t chunk_elements_;

 private:
  Milliseconds timeout_;
  Clock::time_point deadline_;
  std::atomic<State> state_{State::queued};
  std::exception_ptr error_;
};

}  // namespace lockstep::dist

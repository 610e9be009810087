// Operation: a collective under way on shared memory, as one rank sees it. All kinds are the same
// stream of chunks: a rank *offers* chunks of its tensor (through its window, or all at once where
// the tensor itself is shared), chunks are combined or read by whoever may, and a rank *takes* the
// results into its own tensor.
//
//   all_reduce   all offer; anybody claims a chunk that all have offered, and combines it for all
//   broadcast    the root offers, the others take
//   all_gather   all offer, all take from all
//   barrier      no chunks: complete when all have arrived and their calls agree
#pragma once

#include <atomic>

#include <lockstep/distributed/engine.h>
#include <lockstep/distributed/shared_area.h>
#include <lockstep/distributed/strided.h>

namespace lockstep::dist {

/// A call as messages name it: "all_reduce(sum) of f32 [10], sequence number 5 (label)".
struct NamedCall {
  Call call;
  std::string label = {};
  std::string text() const;
};

class Operation final : public Work {
 public:
  /// `source` is what this rank offers from, `outputs` where it takes to (all_gather: one per
  /// rank).
  Operation(std::shared_ptr<Communicator> communicator, const Call& call, std::vector<Tensor> keep,
            StridedBytes source, std::vector<Tensor> outputs, Milliseconds timeout,
            std::string label);

  void wait(Milliseconds timeout) override;
  std::vector<Tensor> result() const override { return outputs_; }
  bool is_completed() override;
  std::exception_ptr exception() const override { return failed() ? error_ : nullptr; }
  uint64_t sequence_number() const override { return call_.sequence; }

  bool over() const { return state_.load(std::memory_order_acquire) >= State::complete; }
  bool failed() const { return state_.load(std::memory_order_acquire) == State::failed; }
  /// Runs what then() left, on the thread that found it complete.
  void notify() {
    if (!failed()) run_then();
  }

  // ---- for the communicator, with the engine's mutex held ----

  uint64_t chunks() const { return chunks_; }
  /// The lane's counts of chunks before this operation: all kinds', and reductions' alone.
  void set_bases(uint64_t all, uint64_t reduced) {
    base_ = all;
    reduce_base_ = reduced;
  }
  /// Does what can be done now; true if something moved.
  bool advance();
  void fail(const std::string& text);
  NamedCall named() const { return {call_, label_}; }
  Clock::time_point deadline() const { return deadline_; }
  /// What went wrong when the deadline passed.
  std::string deadline_text() const;
  /// Whether it still cannot complete without this rank.
  bool needs(int rank) const;

 private:
  enum class State : int { queued, published, agreed, complete, failed };

  bool reduces() const { return call_.kind == CallKind::all_reduce; }
  bool offers() const {
    return reduces() || call_.kind == CallKind::all_gather || rank_ == call_.root;
  }
  bool takes() const {
    return call_.kind == CallKind::all_gather ||
           (call_.kind == CallKind::broadcast && rank_ != call_.root);
  }
  bool direct() const { return call_.allocation != 0; }

  bool lane_is_free() const;
  void publish();
  bool all_arrived() const;
  void compare();
  bool offer();
  bool combine();
  bool take_combined();
  bool take_offered();
  bool finished() const;
  void complete();

  Mark& mark(int rank) const;
  uint64_t offered_by(int rank) const;
  uint64_t least_consumed() const;
  std::byte* place(int rank, uint64_t chunk) const;
  int64_t first(uint64_t chunk) const { return static_cast<int64_t>(chunk) * chunk_elements_; }
  int64_t count(uint64_t chunk) const {
    return std::min(chunk_elements_, elements_ - first(chunk));
  }

  std::shared_ptr<Communicator> communicator_;
  int rank_, size_;
  Call call_;
  std::vector<Tensor> keep_;  // alive until complete
  StridedBytes source_;
  std::vector<Tensor> outputs_;
  std::vector<StridedBytes> targets_;  // of outputs_
  Milliseconds timeout_;
  Clock::time_point deadline_;
  std::string label_;

  int64_t elements_ = 0, chunk_elements_ = 1;
  uint64_t chunks_ = 0, base_ = 0, reduce_base_ = 0;
  uint64_t offered_ = 0, taken_ = 0;
  bool any_window_ = false;         // some rank's chunks go through its window
  std::vector<std::byte*> places_;  // by rank: its tensor where that is shared, else null
  std::vector<std::byte*> buffers_;
  std::atomic<State> state_{State::queued};
  std::exception_ptr error_;
};

}  // namespace lockstep::dist

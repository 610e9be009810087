// Transfer: a send or a receive under way. Transfers from one rank to another are matched in the
// order in which they were called, and no pair of ranks waits for another pair: a receive announces
// itself in the pair's words, and only then does its sender take the rank's one outbox and stream
// through it; so the outbox is only ever held by a transfer that moves.
#pragma once

#include <algorithm>

#include <lockstep/distributed/shm/operation.h>

namespace lockstep::dist {

class Transfer final : public Operation {
 public:
  /// call.sequence counts the sends (or the receives) of this rank to (from) rank call.root.
  Transfer(std::shared_ptr<Communicator> communicator, const Call& call, Collective what);

  bool advance() override;
  bool needs(int rank) const override;
  std::vector<int> missing() const override;
  std::vector<int> not_called() const override;

 private:
  bool sends() const { return call_.is(CollectiveKind::send); }
  int other() const { return call_.root; }
  Pair& pair() const { return sends() ? area().pair(rank_, other()) : area().pair(other(), rank_); }
  bool begin_sending();
  bool push();
  bool pull();
  int64_t first(uint64_t chunk) const { return static_cast<int64_t>(chunk) * chunk_elements_; }
  int64_t count(uint64_t chunk) const {
    return std::min(chunk_elements_, elements_ - first(chunk));
  }

  StridedBytes bytes_;
  int64_t elements_;
  uint64_t chunks_;
  uint64_t moved_ = 0;  // chunks put into the outbox, or read from it
};

/// One rank's transfers with one other, counted: a call's number, and when it is its turn.
struct TransferCounts {
  uint64_t called = 0;
  uint64_t over = 0;
};

}  // namespace lockstep::dist

// Peers: the ranks that share one host's memory, seen from one of them: where each sleeps, whether
// it still lives, and how new memory gets to all of them. Processes and threads differ in this, and
// in nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/peer_error.h>
#include <lockstep/distributed/process_group.h>
#include <lockstep/distributed/shm/event.h>
#include <lockstep/distributed/shm/segment.h>
#include <lockstep/distributed/shm/shared_text.h>

namespace lockstep::dist {

inline constexpr int kMostPeers = 256;  // of a meeting

/// What a rank that is blocked tells its peers (see deadlock.h). It alone writes all but
/// `condemned`.
struct alignas(64) BlockedMark {
  std::atomic<uint64_t> stamp;                     // of the wait; 0 while it is not blocked
  std::atomic<uint64_t> looks;                     // grows when `missing` is written anew
  std::atomic<uint64_t> missing[kMostPeers / 64];  // the peers that it waits for
  std::atomic<uint64_t> condemned;  // a wait's stamp * kMostPeers + who has found the deadlock
  SharedText<512> call;             // what it waits in
  SharedText<4096> finding;         // the deadlock that this rank has found
};

/// A rank's slot in the memory that is mapped first.
struct alignas(64) RankSlot {
  Event event;
  int64_t pid;        // of the rank's process; 0 for a thread
  uint64_t cpus[16];  // the processors it may run on
  BlockedMark blocked;
};

class LOCKSTEP_API Peers {
 public:
  Peers(int rank, int size, std::shared_ptr<Segment> first)
      : rank_(rank), size_(size), first_(std::move(first)) {}
  virtual ~Peers() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The memory of the meeting: a slot per rank, then the first communicator's area.
  const std::shared_ptr<Segment>& first() const { return first_; }
  static size_t slots_bytes(int size) { return sizeof(RankSlot) * static_cast<size_t>(size); }
  RankSlot& slot(int rank) const { return reinterpret_cast<RankSlot*>(first_->data())[rank]; }
  /// Wakes the others if they sleep.
  void wake_others() const {
    for (int r = 0; r < size_; ++r)
      if (r != rank_) wake(slot(r).event);
  }
  /// Writes this rank's pid and processors into its slot.
  void fill_slot(int64_t pid) const;
  /// Whether there is a processor for each rank, so that polling steals no time from a peer.
  /// Valid once all ranks have filled their slots.
  bool may_poll() const;

  /// Why nothing can come from a rank any more ("(pid 7) died: ..."); empty while it lives.
  virtual std::string lost(int rank) = 0;
  /// How many other threads of this process make no call of this rank's groups, though they may run
  /// the program's code.
  virtual int other_ranks_threads() const { return 0; }
  /// New memory of `bytes` bytes, the same on all members that call with this tag. They have agreed
  /// to call it before, so it waits for the first member alone, who hands it out. Throws
  /// OutOfMemory on all of them if that one has none, DistError when it is lost or late.
  virtual std::shared_ptr<Segment> share(const std::vector<int>& members, uint64_t tag,
                                         size_t bytes, Clock::time_point deadline) = 0;

 private:
  int rank_, size_;
  std::shared_ptr<Segment> first_;
};

}  // namespace lockstep::dist

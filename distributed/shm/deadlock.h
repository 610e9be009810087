// Deadlocks between groups. Ranks that wait in different groups for each other will wait until a
// deadline: rank 0 in an all_reduce of one group, rank 1 in one of another. The rule: a rank is
// blocked while its only thread that may run the program's code waits for one call, without a
// timeout of that call's own; it waits for the ranks that have not made the call. A cycle of blocked
// ranks, each of which has been blocked for a second, is a deadlock, whatever else is under way:
// none of them can make its call. A rank that computes is in no cycle, and one with further threads
// of the program counts as computing.
//
// A blocked rank marks itself so in its slot of the shared memory, and writes anew, every 150 ms,
// which ranks it waits for. A cycle is reported when it is found twice, with the same waits, and
// each of its ranks has written anew in between.
#pragma once

#include <functional>

#include <lockstep/distributed/shm/peers.h>

namespace lockstep::dist {

/// What a call waits for.
struct Obstacle {
  std::string call;          // "all_reduce(sum) of f32 [1], sequence number 3, of child 1 of ..."
  std::vector<int> missing;  // the peers that have not made it
};

/// A wait under way, on the waiting thread's stack.
class BlockedWait {
 public:
  BlockedWait(Peers& peers, std::function<Obstacle()> obstacle);
  /// Takes this rank's mark back.
  ~BlockedWait();
  BlockedWait(const BlockedWait&) = delete;

  /// Whether a deadlock has been found that this rank is part of, and it has not taken notice of it.
  static bool is_condemned(const Peers& peers, int rank);
  /// The deadlock that another rank has found and that this wait is part of; empty when there is none.
  std::string verdict() const;
  /// Called before each sleep: keeps this rank's mark up to date, and looks at the others'. Returns
  /// what the deadlock is that this wait is part of; empty when there is none.
  std::string look();

 private:
  /// One rank of a cycle as it was seen.
  struct Seen {
    int rank;
    uint64_t stamp, looks;
  };
  BlockedMark& mark(int rank) const { return peers_.slot(rank).blocked; }
  void publish(Clock::time_point now);
  std::vector<Seen> find_cycle() const;
  bool holds(const std::vector<Seen>& cycle) const;
  bool was_renewed(const std::vector<Seen>& cycle) const;
  std::string condemn(const std::vector<Seen>& cycle) const;

  Peers& peers_;
  std::function<Obstacle()> obstacle_;
  Clock::time_point begin_ = Clock::now(), next_look_;
  uint64_t stamp_ = 0;
  std::vector<Seen> cycle_;
};

}  // namespace lockstep::dist

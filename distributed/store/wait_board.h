// Deadlocks between groups of ranks that share no memory; the rule is shm/deadlock.h's. A rank that
// is blocked for a moment writes into the job's store what it waits in and how many calls of
// each group it has made, and from then on looks at the others' a few times a second.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/distributed/deadline.h>
#include <lockstep/tensor/export.h>
#include <lockstep/tensor/process.h>

namespace lockstep::dist {

class Store;

/// A call that a rank waits in.
struct BlockedCall {
  std::string calls;    // what is counted: WaitBoard::count's name for it, on those who must call
  uint64_t number = 0;  // they must have made so many of them
  std::vector<int> ranks;  // the job's ranks that must
  std::string text;        // "all_reduce(sum) of f32 [1], sequence number 3, of group gloo.1"
  std::string end_key;     // where the store keeps why its group has ended
};

class LOCKSTEP_API WaitBoard {
 public:
  /// This rank has made `number` of the calls of this name.
  void count(const std::string& calls, uint64_t number);

 private:
  friend class BlockedStoreWait;
  std::mutex mutex_;
  std::map<std::string, uint64_t> counts_;
};

/// A wait under way, on the waiting thread's stack.
class LOCKSTEP_API BlockedStoreWait {
 public:
  BlockedStoreWait(Store& store, BlockedCall call);
  /// Takes this rank's word back.
  ~BlockedStoreWait();
  BlockedStoreWait(const BlockedStoreWait&) = delete;

  /// To be called now and then. Returns what the deadlock is that this wait is part of, which by
  /// then all its groups have ended with; empty when there is none.
  std::string look();

 private:
  struct Record;
  std::string find_deadlock();

  Store& store_;
  BlockedCall call_;
  Clock::time_point begin_ = Clock::now(), next_look_;
  bool written_ = false;
  std::string last_;  // the cycle that the last look has found, by its records
};

}  // namespace lockstep::dist

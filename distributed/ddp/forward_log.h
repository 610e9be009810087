// ForwardLog: finds forwards whose backward a rank left out. A rank that runs a forward, and then goes
// on to the next batch without backward, reduces its next gradients with older ones of the others from
// then on, and every collective still fits.
//
// A forward is known by the graph nodes that it made: their sequence numbers are consecutive.
#pragma once

#include <cstdint>
#include <span>
#include <thread>
#include <vector>

namespace lockstep::dist {

class ForwardLog {
 public:
  /// Around a forward whose backward is to be synchronised.
  void starts();
  void ends();
  /// A backward will run nodes with these sequence numbers, on this thread. Returns whether any is of a
  /// forward.
  bool backward_runs(std::span<const uint64_t> nodes);
  /// Of the forwards before the last one that a backward ran through, those that no backward did. A
  /// later forward may still get its backward.
  uint32_t skipped() const;
  void clear() { forwards_.clear(); }

 private:
  struct Forward {
    uint64_t begin, end;  // of the sequence numbers
    bool has_backward;
  };
  void stay_on_thread();

  std::vector<Forward> forwards_;  // in ascending order
  std::thread::id thread_;         // sequence numbers of one thread say nothing on another
};

}  // namespace lockstep::dist

// Watchdog: a process that outlives the launcher by a moment. It reads from a pipe which process
// groups are alive, and when the pipe ends, because the launcher is done or was killed, it kills
// those that are left.
#pragma once

#include <sys/types.h>

#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

class Watchdog {
 public:
  /// Forks. Throws DistError.
  Watchdog();
  /// Ends the watchdog and waits for it.
  ~Watchdog();
  /// In a child, before it starts anything: "the group that I lead is alive".
  void announce(pid_t group) const { tell(group); }
  /// In the launcher, before it reaps the leader: the group is gone.
  void forget(pid_t group) const { tell(-group); }

 private:
  void tell(pid_t word) const;

  Fd pipe_;
  pid_t pid_ = -1;
};

}  // namespace lockstep::dist

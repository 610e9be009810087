// Watchdog: a process that outlives the launcher by a moment. It learns over a socket which process
// groups are alive, and when the socket closes, because the launcher is done or was killed, it kills
// those that are left.
//
// The kernel vouches for the senders: a group is known by the process that announced itself as its
// leader, and by a descriptor of that process, so the contents of a message cannot select what is
// killed.
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
  /// In a child that leads a group, before it starts anything: the group is alive.
  void announce() const { send(0); }
  /// In the launcher, before it reaps the leader: the group is gone.
  void forget(pid_t group) const { send(group); }

 private:
  void send(pid_t gone) const;

  Fd socket_;
  pid_t pid_ = -1;
};

}  // namespace lockstep::dist

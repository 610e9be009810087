// Engine: one rank's motor. It owns no thread; whoever waits, tests or starts a collective turns
// it, and each turn moves all of the rank's outstanding operations, on all its communicators.
// Waiting is: turn, poll a little while there are processors enough, then sleep on the rank's
// event, at most 200 ms at a time, to look at deadlines and at peers that may have died.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/distributed/shm/peers.h>

namespace lockstep::dist {

class Communicator;

class Engine {
 public:
  explicit Engine(std::unique_ptr<Peers> peers);

  Peers& peers() const { return *peers_; }
  /// Guards this rank's communicators and operations.
  std::mutex& mutex() { return mutex_; }
  /// With the mutex held.
  void enlist(Communicator* c) { communicators_.push_back(c); }
  void dismiss(Communicator* c);

  /// Moves everything that can move now; true if something did.
  bool progress();
  /// Turns until done() is true. `look` runs before every sleep, and may throw.
  void wait(const std::function<bool()>& done, const std::function<void()>& look = {});

 private:
  void inspect();
  std::chrono::nanoseconds longest_sleep();

  std::unique_ptr<Peers> peers_;
  int polls_;  // turns before a sleep
  std::mutex mutex_;
  std::vector<Communicator*> communicators_;
  unsigned turns_ = 0;
  Clock::time_point next_look_;
};

}  // namespace lockstep::dist

// Engine: the progress engine of one rank. It has no thread: every call that waits, tests or starts
// a collective polls it, and a poll advances all outstanding operations of the rank, on all its
// communicators. Waiting is: poll, spin a little while there are processors enough, then sleep on
// the rank's event, at most 200 ms at a time, to check deadlines, dead peers and deadlocks.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/distributed/shm/deadlock.h>

namespace lockstep::dist {

class Communicator;

class Engine {
 public:
  explicit Engine(std::unique_ptr<Peers> peers);

  Peers& peers() const { return *peers_; }
  /// False in a forked child, where the mutex may be locked for ever.
  bool is_here() const { return origin_.is_here(); }
  const Origin& origin() const { return origin_; }
  /// Guards this rank's communicators and operations.
  std::mutex& mutex() { return mutex_; }
  /// With the mutex held.
  void enlist(Communicator* c) { communicators_.push_back(c); }
  void dismiss(Communicator* c);

  /// Moves everything that can move now; true if something did.
  bool progress();
  /// Polls until done() is true. `look` runs before every sleep, and may throw. With the mutex held
  /// `obstacle` says what is waited for (empty: the wait has a timeout of its own, and so is part of
  /// no deadlock), and `end` is told of a deadlock.
  void wait(const std::function<bool()>& done, const std::function<void()>& look,
            const std::function<Obstacle()>& obstacle,
            const std::function<void(const std::string&)>& end);

 private:
  void inspect();
  std::chrono::nanoseconds longest_sleep();

  std::unique_ptr<Peers> peers_;
  const Origin origin_;
  int polls_;  // before a sleep
  std::mutex mutex_;
  std::vector<Communicator*> communicators_;
  unsigned turns_ = 0;
  Clock::time_point next_look_;
};

}  // namespace lockstep::dist

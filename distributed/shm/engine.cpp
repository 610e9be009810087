// Polling and waiting of the progress engine.
#include <lockstep/distributed/shm/engine.h>

#include <algorithm>
#include <optional>

#include <lockstep/distributed/shm/communicator.h>
#include <lockstep/distributed/shm/operation.h>

namespace lockstep::dist {

namespace {
constexpr std::chrono::milliseconds kLook{200};
}

Engine::Engine(std::unique_ptr<Peers> peers)
    : peers_(std::move(peers)),
      polls_(peers_->may_poll() ? 1000 : 0),
      next_look_(Clock::now() + kLook) {}

void Engine::dismiss(Communicator* c) { std::erase(communicators_, c); }

bool Engine::progress() {
  std::vector<std::shared_ptr<Operation>> finished;
  bool moved = false;
  {
    std::lock_guard lock(mutex_);
    for (Communicator* c : communicators_) moved |= c->advance(finished);
    // Somebody who only ever tests must notice a death as well; the clock is not read at every
    // turn.
    if (++turns_ % 32 == 0 && Clock::now() >= next_look_) inspect();
  }
  if (finished.empty()) return moved;
  for (const auto& op : finished) op->take_inputs();
  wake(
      peers_->slot(peers_->rank()).event);  // another thread of this rank may sleep for one of them
  return true;
}

void Engine::inspect() {
  const Clock::time_point now = Clock::now();
  next_look_ = now + kLook;
  for (Communicator* c : communicators_) c->inspect(now);
}

std::chrono::nanoseconds Engine::longest_sleep() {
  const Clock::time_point now = Clock::now();
  Clock::time_point until = now + kLook;
  for (Communicator* c : communicators_) until = std::min(until, c->earliest_deadline());
  return until - now;
}

void Engine::wait(const std::function<bool()>& done, const std::function<void()>& look,
                  const std::function<Obstacle()>& obstacle,
                  const std::function<void(const std::string&)>& end) {
  // Made before the first sleep: a short wait costs nothing more.
  std::optional<BlockedWait> blocked;
  int polls = polls_;
  for (;;) {
    const bool moved = progress();
    if (done()) return;
    if (moved) {
      polls = polls_;
      continue;
    }
    if (polls > 0) {
      --polls;
      for (int i = 0; i < 8; ++i) relax();
      continue;
    }
    Sleeper sleeper(peers_->slot(peers_->rank()).event);
    if (progress()) continue;
    if (done()) return;
    if (look) look();
    if (!blocked && obstacle) blocked.emplace(*peers_, obstacle);
    std::chrono::nanoseconds most;
    {
      std::lock_guard lock(mutex_);
      inspect();
      std::string deadlock = blocked ? blocked->verdict() : std::string();
      if (blocked && deadlock.empty()) deadlock = blocked->look();
      if (!deadlock.empty()) end(deadlock);
      most = longest_sleep();
    }
    if (progress()) continue;  // what inspect() made fail
    sleeper.sleep(most);
  }
}

}  // namespace lockstep::dist

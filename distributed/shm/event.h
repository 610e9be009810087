// Event: a word in shared memory on which one rank sleeps until another has news. Raising it costs
// one locked instruction while nobody sleeps: the sleeper counts itself, checks once more, and only
// then goes to sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::dist {

/// Lies in zeroed memory that several processes map.
struct alignas(64) Event {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> sleepers;
};

/// Wakes whoever sleeps on `event`. What it is to see must have been stored before.
void wake(Event& event);

/// One attempt to sleep: announce, look again at what is awaited, then sleep() unless it is there.
class Sleeper {
 public:
  explicit Sleeper(Event& event) : event_(event) {
    event_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    seen_ = event_.word.load(std::memory_order_seq_cst);
  }
  ~Sleeper() { event_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  /// Until the event is raised, at most this long.
  void sleep(std::chrono::nanoseconds most);

 private:
  Event& event_;
  uint32_t seen_;
};

/// The processor's hint that this is a polling loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace lockstep::dist

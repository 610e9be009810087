// Event by futex. The futexes are shared ones: the word may lie in a mapping of several processes.
#include <lockstep/distributed/shm/event.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace lockstep::dist {

namespace {
long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, value, timeout, nullptr, 0);
}
}  // namespace

void wake(Event& event) {
  // A read that is also a write takes a place in the order of `sleepers`: either it sees the
  // sleeper, or the sleeper's own count comes later and sees the caller's stores.
  if (event.sleepers.fetch_add(0, std::memory_order_seq_cst) == 0) return;
  event.word.fetch_add(1, std::memory_order_seq_cst);
  futex(event.word, FUTEX_WAKE, INT_MAX, nullptr);
}

void Sleeper::sleep(std::chrono::nanoseconds most) {
  if (most.count() <= 0) return;
  const timespec timeout{static_cast<time_t>(most.count() / 1'000'000'000),
                         static_cast<long>(most.count() % 1'000'000'000)};
  futex(event_.word, FUTEX_WAIT, seen_, &timeout);
}

}  // namespace lockstep::dist

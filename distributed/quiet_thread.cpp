// The signal mask around the start of a thread.
#include <lockstep/distributed/quiet_thread.h>

#include <signal.h>

namespace lockstep::dist {

void with_signals_blocked(const std::function<void()>& f) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    f();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace lockstep::dist

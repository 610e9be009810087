// One fork() handler for the whole library: the child gets another number than its parent.
#include <lockstep/tensor/process.h>

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

#include <atomic>

namespace lockstep {
namespace {

std::atomic<uint64_t> process{0};
std::atomic<int> library_threads{0};
thread_local int nested = 0;

const int registered = pthread_atfork(nullptr, nullptr, [] {
  process.fetch_add(1, std::memory_order_relaxed);
  library_threads.store(nested > 0 ? 1 : 0, std::memory_order_relaxed);
});

}  // namespace

Origin::Origin() : process_(process.load(std::memory_order_relaxed)) {}
bool Origin::is_here() const { return process_ == process.load(std::memory_order_relaxed); }

LibraryThread::LibraryThread() {
  if (nested++ == 0) count_library_threads(1);
}
LibraryThread::~LibraryThread() {
  if (--nested == 0) count_library_threads(-1);
}

void count_library_threads(int by) { library_threads.fetch_add(by, std::memory_order_relaxed); }

int foreign_threads() {
  struct stat threads {};
  // A directory has two links and one more for each subdirectory, here one per thread.
  if (stat("/proc/self/task", &threads) != 0 || threads.st_nlink < 3) return 1;
  const int all = static_cast<int>(threads.st_nlink) - 2, own = nested > 0 ? 0 : 1;
  return all - own - library_threads.load(std::memory_order_relaxed);
}

void with_signals_blocked(const std::function<void()>& f) {
  struct Blocked {
    sigset_t before;
    Blocked() {
      sigset_t taken;
      sigfillset(&taken);
      for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF})
        sigdelset(&taken, own);
      pthread_sigmask(SIG_BLOCK, &taken, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } const blocked;
  f();
}

}  // namespace lockstep

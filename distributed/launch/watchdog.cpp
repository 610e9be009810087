// The watchdog's loop: a set of process groups, kept by words from a pipe.
#include <lockstep/distributed/launch/watchdog.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

[[noreturn]] void watch(int pipe) {
  // Ctrl-C and a closing terminal must not end it before its time, and it must hold nobody's output
  // open.
  setsid();
  prctl(PR_SET_NAME, "lockstep-watch");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  dup2(pipe, 0);
  close_range(1, ~0U, 0);
  std::vector<pid_t> alive;
  pid_t word;
  for (;;) {
    const ssize_t n = read(0, &word, sizeof word);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof word) break;
    if (word > 0)
      alive.push_back(word);
    else
      std::erase(alive, -word);
  }
  for (const pid_t group : alive) kill(-group, SIGKILL);
  _exit(0);
}

}  // namespace

Watchdog::Watchdog() {
  int ends[2];
  LOCKSTEP_CHECK(pipe2(ends, O_CLOEXEC) == 0, DistError,
                 "launch: cannot make a pipe: ", std::strerror(errno));
  const Fd reading(ends[0]);
  pipe_ = Fd(ends[1]);
  pid_ = fork();
  LOCKSTEP_CHECK(pid_ >= 0, DistError, "launch: cannot fork: ", std::strerror(errno));
  if (pid_ == 0) watch(reading.get());
}

Watchdog::~Watchdog() {
  pipe_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Watchdog::tell(pid_t word) const {
  [[maybe_unused]] const ssize_t n =
      write(pipe_.get(), &word, sizeof word);  // at once: it is below PIPE_BUF
}

}  // namespace lockstep::dist

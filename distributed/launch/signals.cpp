// LaunchSignals: a signalfd.
#include <lockstep/distributed/launch/signals.h>

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {
bool is_ignored(int signal) {
  struct sigaction action;
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}
}  // namespace

LaunchSignals::LaunchSignals() {
  pipe_before_ = signal(SIGPIPE, SIG_IGN);
  file_size_before_ = signal(SIGXFSZ, SIG_IGN);  // a log file at its limit is reported
  child_before_ = signal(SIGCHLD, SIG_DFL);      // where it is ignored no child can be waited for
  sigset_t caught;
  sigemptyset(&caught);
  // A blocked signal reaches the descriptor even where it is ignored.
  for (const int s : {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
    if (!is_ignored(s)) sigaddset(&caught, s);
  sigprocmask(SIG_BLOCK, &caught, &before_);
  fd_ = Fd(signalfd(-1, &caught, SFD_CLOEXEC | SFD_NONBLOCK));
  LOCKSTEP_CHECK(fd_, DistError, "launch: cannot receive signals: ", std::strerror(errno));
}

std::optional<int> LaunchSignals::next() const {
  signalfd_siginfo info;
  if (read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

void LaunchSignals::restore() const {
  sigprocmask(SIG_SETMASK, &before_, nullptr);
  signal(SIGPIPE, pipe_before_);
  signal(SIGXFSZ, file_size_before_);
  signal(SIGCHLD, child_before_);
}

bool LaunchSignals::ends_the_job(int signal) {
  return signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT;
}

}  // namespace lockstep::dist

// The watchdog's loop: a set of process groups, kept by messages.
#include <lockstep/distributed/launch/watchdog.h>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include <lockstep/distributed/launch/credentials.h>
#include <lockstep/distributed/launch/descriptors.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

struct Message {
  static constexpr uint64_t kMagic = 0x4c4f434b57415443;  // "LOCKWATC"
  uint64_t magic = kMagic;
  int64_t gone = 0;  // the group that has ended; 0: the sender leads a new one
};

struct Watched {
  pid_t group;
  Fd leader;  // none where the kernel has no such descriptors (before 5.3, or a filter)
};

/// Whether the number still names the group. It cannot be used again while a process of the group
/// lives; with the leader reaped, a process of that number is another one.
bool is_alive(const Watched& w) {
  if (!w.leader || syscall(SYS_pidfd_send_signal, w.leader.get(), 0, nullptr, 0) == 0) return true;
  return errno != ESRCH || (kill(w.group, 0) != 0 && errno == ESRCH);
}

[[noreturn]] void watch(int socket, pid_t launcher) {
  // Ctrl-C and a closing terminal must not end it early, and it must not keep inherited pipes open.
  setsid();
  prctl(PR_SET_NAME, "lockstep-watch");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  dup2(socket, 0);
  close_descriptors(1);
  std::vector<Watched> groups;
  for (;;) {
    Message message;
    const Received got = receive(0, &message, sizeof message);
    if (got.bytes <= 0) break;
    if (got.bytes != sizeof message || message.magic != Message::kMagic) continue;
    if (message.gone == 0 && got.sender.pid > 0 && got.sender.pid != launcher)
      groups.push_back(
          {got.sender.pid, Fd(static_cast<int>(syscall(SYS_pidfd_open, got.sender.pid, 0)))});
    else if (got.sender.pid == launcher)
      std::erase_if(groups, [&](const Watched& w) { return w.group == message.gone; });
  }
  for (const Watched& w : groups)
    if (is_alive(w)) kill(-w.group, SIGKILL);
  _exit(0);
}

}  // namespace

Watchdog::Watchdog() {
  int ends[2];
  LOCKSTEP_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, DistError,
                 "launch: cannot make a socket: ", std::strerror(errno));
  const Fd reading(ends[0]);
  socket_ = Fd(ends[1]);
  LOCKSTEP_CHECK(receive_credentials(reading.get()), DistError,
                 "launch: cannot receive credentials: ", std::strerror(errno));
  const pid_t launcher = getpid();
  pid_ = fork();
  LOCKSTEP_CHECK(pid_ >= 0, DistError, "launch: cannot fork: ", std::strerror(errno));
  if (pid_ != 0) return;
  socket_.reset();  // or the socket would never close
  watch(reading.get(), launcher);
}

Watchdog::~Watchdog() {
  socket_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Watchdog::send(pid_t gone) const {
  const Message message{.gone = gone};
  while (::send(socket_.get(), &message, sizeof message, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

}  // namespace lockstep::dist

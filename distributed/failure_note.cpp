#include <lockstep/distributed/failure_note.h>

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

namespace {
std::atomic<bool> sent{false};
}

void suppress_failure_note() noexcept { sent = true; }

void note_failed_peer() noexcept {
  const char *name = std::getenv("LOCKSTEP_FAILURE_SOCKET"), *rank = std::getenv("LOCKSTEP_RANK");
  if (!name || !rank || sent.exchange(true)) return;
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  const size_t n = std::min(std::string_view(name).size(), sizeof to.sun_path - 1);
  std::memcpy(to.sun_path + 1, name, n);  // after a zero byte: an abstract name
  const Fd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const timeval patience{1, 0};  // a launcher that is stopped reads nothing
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  const FailureNote note{.rank = std::atoll(rank)};
  // Without the note the launcher goes by the order of the ranks' ends.
  [[maybe_unused]] const ssize_t written =
      sendto(socket.get(), &note, sizeof note, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&to),
             static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n));
}

}  // namespace lockstep::dist

#include <lockstep/distributed/launch/failure_notes.h>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/launch/credentials.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

FailureNotes::FailureNotes()
    : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  socklen_t length = sizeof name;
  auto* address = reinterpret_cast<sockaddr*>(&name);
  // Bound to the family alone, it gets a free abstract name.
  const bool bound = socket_ && receive_credentials(socket_.get()) &&
                     bind(socket_.get(), address, sizeof(sa_family_t)) == 0 &&
                     getsockname(socket_.get(), address, &length) == 0;
  LOCKSTEP_CHECK(bound, DistError, "launch: cannot make a socket: ", std::strerror(errno));
  const size_t begin = offsetof(sockaddr_un, sun_path) + 1;
  variable_ =
      str_cat("LOCKSTEP_FAILURE_SOCKET=", std::string_view(name.sun_path + 1, length - begin));
}

void FailureNotes::read() {
  FailureNote note;
  for (;;) {
    const Received got = receive(socket_.get(), &note, sizeof note);
    if (got.bytes < 0) return;
    const bool is_ours = got.sender.uid == getuid() || got.sender.uid == 0;
    if (got.bytes == sizeof note && note.magic == FailureNote::kMagic && is_ours)
      ranks_.push_back(note.rank);
  }
}

bool FailureNotes::has(int rank) const {
  return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end();
}

}  // namespace lockstep::dist

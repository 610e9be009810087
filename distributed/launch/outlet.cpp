// Outlet: pieces that a pipe takes whole, as long as it has room for one.
#include <lockstep/distributed/launch/outlet.h>

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace lockstep::dist {

void Outlet::put(std::string_view text) {
  waiting_ += text;
  flush();
}

// The descriptor stays blocking, since others share it: a write of a piece at most as large as a
// pipe promises room for does not block.
void Outlet::flush() {
  size_t done = 0;
  while (done < waiting_.size()) {
    pollfd p{fd_, POLLOUT, 0};
    if (poll(&p, 1, 0) == 0) break;
    const size_t piece = std::min<size_t>(waiting_.size() - done, PIPE_BUF);
    const ssize_t n = ::write(fd_, waiting_.data() + done, piece);
    if (n >= 0)
      done += static_cast<size_t>(n);
    else if (errno == EAGAIN)
      break;
    else if (errno != EINTR)
      done = waiting_.size();
  }
  waiting_.erase(0, done);
}

}  // namespace lockstep::dist

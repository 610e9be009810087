// Fd's close.
#include <lockstep/distributed/fd.h>

#include <unistd.h>

namespace lockstep::dist {

void Fd::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

}  // namespace lockstep::dist

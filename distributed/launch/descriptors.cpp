#include <lockstep/distributed/launch/descriptors.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

// The system call itself: glibc has had close_range only since 2.34.
bool close_range_from([[maybe_unused]] int first, [[maybe_unused]] bool on_exec) {
#ifdef SYS_close_range
  constexpr unsigned kOnExec = 4;  // CLOSE_RANGE_CLOEXEC, Linux 5.11
  return syscall(SYS_close_range, static_cast<unsigned>(first), ~0U, on_exec ? kOnExec : 0U) == 0;
#else
  return false;
#endif
}

std::vector<int> open_descriptors() {
  std::vector<int> all;
  if (DIR* folder = opendir("/proc/self/fd")) {
    while (const dirent* entry = readdir(folder))
      if (const int fd = std::atoi(entry->d_name); fd > 0 && fd != dirfd(folder)) all.push_back(fd);
    closedir(folder);
  } else {  // no /proc
    constexpr long kMost = 65536;
    for (int fd = 0; fd < std::min(sysconf(_SC_OPEN_MAX), kMost); ++fd)
      if (fcntl(fd, F_GETFD) >= 0) all.push_back(fd);
  }
  return all;
}

}  // namespace

void fill_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    const int null = open("/dev/null", O_RDWR);  // gets the lowest free number
    LOCKSTEP_CHECK(null == fd, IoError, "launch: descriptor ", fd, " is closed, and /dev/null ",
                   "cannot be opened in its place: ", std::strerror(errno));
  }
}

void close_descriptors(int first) {
  if (close_range_from(first, false)) return;
  for (const int fd : open_descriptors())
    if (fd >= first) close(fd);
}

void close_descriptors_on_exec(int first) {
  if (close_range_from(first, true)) return;
  for (const int fd : open_descriptors())
    if (fd >= first) fcntl(fd, F_SETFD, FD_CLOEXEC);
}

}  // namespace lockstep::dist

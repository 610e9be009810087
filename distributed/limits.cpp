// getrlimit and the errors that come of it.
#include <lockstep/distributed/limits.h>

#include <fcntl.h>
#include <sys/resource.h>

#include <cerrno>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/system_text.h>

namespace lockstep::dist {

namespace {

// "; this process may have N (ulimit -n)"; nothing where there is no limit.
std::string limited(int resource, const char* flag, const char* unit = "") {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY)
    return {};
  return str_cat("; this process may have ", static_cast<uint64_t>(limit.rlim_cur), unit,
                 " (ulimit ", flag, ")");
}

}  // namespace

std::string error_text(int error) {
  std::string text = system_text(error);
  if (error == EMFILE || error == ETOOMANYREFS) text += limited(RLIMIT_NOFILE, "-n");
  if (error == EFBIG) text += limited(RLIMIT_FSIZE, "-f", " bytes in a file");
  if (error == ENOMEM) text += limited(RLIMIT_AS, "-v", " bytes of address space");
  if (error == EAGAIN) text += limited(RLIMIT_NPROC, "-u");
  return text;
}

std::string thread_limit_text(const std::string& what) {
  return str_cat("cannot start ", what, ": ", error_text(EAGAIN),
                 "; raise the limit of processes, or of the control group's pids");
}

std::string file_size_limit_text(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      bytes <= limit.rlim_cur)
    return {};
  return str_cat("a file may have ", static_cast<uint64_t>(limit.rlim_cur),
                 " bytes (ulimit -f); raise that limit");
}

void open_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) open("/dev/null", O_RDWR);  // the lowest is free
}

}  // namespace lockstep::dist

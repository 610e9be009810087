// log_info: whole lines, written at once, so that ranks do not mix.
#include <lockstep/distributed/log.h>

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace lockstep::dist {

void log_info(std::string_view text) {
  const char* level = std::getenv("LOCKSTEP_DEBUG");
  if (!level || (std::string_view(level) != "info" && std::string_view(level) != "detail")) return;
  std::string line = "lockstep: ";
  line += text;
  line += '\n';
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace lockstep::dist

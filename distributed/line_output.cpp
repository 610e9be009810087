// LineOutput's cutting into lines.
#include <lockstep/distributed/line_output.h>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace lockstep::dist {

namespace {
constexpr size_t kLongestLine = 64 << 10;  // longer ones are cut
constexpr size_t kLastLines = 20;
}  // namespace

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n > 0)
      text.remove_prefix(static_cast<size_t>(n));
    else if (n < 0 && errno == EAGAIN) {
      pollfd p{fd, POLLOUT, 0};
      poll(&p, 1, -1);
    } else if (n < 0 && errno != EINTR) {
      return;
    }
  }
}

LineOutput::LineOutput(Fd pipe, int to, std::string prefix, Fd log)
    : pipe_(std::move(pipe)), to_(to), prefix_(std::move(prefix)), log_(std::move(log)) {
  fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

bool LineOutput::pump() {
  char buffer[64 << 10];
  const ssize_t n = ::read(pipe_.get(), buffer, sizeof buffer);
  if (n > 0) take({buffer, static_cast<size_t>(n)});
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

void LineOutput::finish() {
  if (!pipe_) return;
  char buffer[64 << 10];
  ssize_t n;
  while ((n = ::read(pipe_.get(), buffer, sizeof buffer)) > 0)
    take({buffer, static_cast<size_t>(n)});
  if (!line_.empty()) put(std::exchange(line_, {}));
  pipe_.reset();
}

void LineOutput::take(std::string_view text) {
  if (log_) write_all(log_.get(), text);
  for (;;) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) break;
    line_ += text.substr(0, end);
    text.remove_prefix(end + 1);
    put(line_);
    line_.clear();
  }
  line_ += text;
  if (line_.size() >= kLongestLine) put(std::exchange(line_, {}));
}

void LineOutput::put(std::string_view line) {
  if (last_.size() == kLastLines) last_.pop_front();
  last_.emplace_back(line);
  if (to_ < 0) return;
  std::string whole = prefix_;
  whole += line;
  whole += '\n';
  write_all(to_, whole);
}

}  // namespace lockstep::dist

// LineOutput's cutting into lines.
#include <lockstep/distributed/launch/line_output.h>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {
constexpr size_t kPiece = 64 << 10;
constexpr size_t kLongestLine = 64 << 10;  // longer ones are cut
constexpr size_t kLastLines = 20;
}  // namespace

LineOutput::LineOutput(Fd pipe, Outlet* to, std::string prefix, Fd log)
    : pipe_(std::move(pipe)), to_(to), prefix_(std::move(prefix)), log_(std::move(log)) {
  fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

bool LineOutput::pump() {
  char buffer[kPiece];
  const ssize_t n = ::read(pipe_.get(), buffer, sizeof buffer);
  if (n > 0) take({buffer, static_cast<size_t>(n)});
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

void LineOutput::finish() {
  if (!pipe_) return;
  // Somebody who left the rank's group may write on for ever.
  int left = 0;
  ioctl(pipe_.get(), FIONREAD, &left);
  char buffer[kPiece];
  while (left > 0) {
    const ssize_t n =
        ::read(pipe_.get(), buffer, std::min(sizeof buffer, static_cast<size_t>(left)));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    take({buffer, static_cast<size_t>(n)});
    left -= static_cast<int>(n);
  }
  if (!line_.empty()) put(std::exchange(line_, {}));
  pipe_.reset();
}

void LineOutput::take(std::string_view text) {
  write_log(text);
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

void LineOutput::write_log(std::string_view text) {
  while (log_ && !text.empty()) {
    const ssize_t n = ::write(log_.get(), text.data(), text.size());
    if (n > 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (errno != EINTR) {
      put(str_cat("lockstep-run: this stream's log file ends here: ", std::strerror(errno)));
      log_.reset();
    }
  }
}

void LineOutput::put(std::string_view line) {
  if (last_.size() == kLastLines) last_.pop_front();
  last_.emplace_back(line);
  if (!to_) return;
  std::string whole = prefix_;
  whole += line;
  whole += '\n';
  to_->put(whole);
}

}  // namespace lockstep::dist

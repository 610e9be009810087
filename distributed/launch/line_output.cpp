// LineOutput: from pieces of a pipe to lines.
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
constexpr size_t kLongestLine = 4 << 20;
constexpr size_t kLastLines = 20, kLongestLastLine = 2000;
constexpr std::string_view kMark = " [cut]";

// The first `most` bytes at most, without the beginning of a character of UTF-8 at their end.
std::string_view first_bytes(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;
  const auto continues = [&] { return (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80; };
  while (end > 0 && most - end < 3 && continues()) --end;
  return text.substr(0, continues() ? most : end);
}
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
  // A process that left the rank's group may keep the pipe open and write without end.
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
  while (line_.size() > kLongestLine) put_begin_of_line();
}

void LineOutput::put_begin_of_line() {
  const std::string begin(first_bytes(line_, kLongestLine));
  line_.erase(0, begin.size());
  put(str_cat(begin, kMark));
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
  last_.emplace_back(first_bytes(line, kLongestLastLine));
  if (last_.back().size() < line.size()) last_.back() += kMark;
  if (!to_) return;
  std::string whole = prefix_;
  whole += line;
  whole += '\n';
  to_->put(whole);
}

}  // namespace lockstep::dist

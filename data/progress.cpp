// The terminal line is redrawn at most ten times a second; a log gets a line every few seconds.
#include <lockstep/data/progress.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

namespace lockstep::data {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kWidestBar = 30, kNarrowestBar = 5;

bool is_terminal(std::FILE* out) {
  const char* term = std::getenv("TERM");
  return ::isatty(::fileno(out)) && !(term && std::string_view(term) == "dumb");
}

// no-color.org: any non-empty value turns colour off.
bool wants_colour() {
  const char* off = std::getenv("NO_COLOR");
  return !(off && *off);
}

int width_of(std::FILE* out) {
  winsize size{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

/// printf's "%.Nf" without the locale's decimal point; large values in exponent form.
std::string fixed(double value, int decimals) {
  const bool large = std::isfinite(value) && std::abs(value) >= 1e15;
  char text[64];
  const auto end =
      std::to_chars(text, text + sizeof text, value,
                    large ? std::chars_format::scientific : std::chars_format::fixed, decimals);
  return {text, end.ptr};
}

/// Columns of a UTF-8 text: its bytes without continuation bytes.
size_t columns_of(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

/// The beginning of a UTF-8 text that fits `columns`.
std::string cut(const std::string& text, size_t columns) {
  size_t end = 0;
  for (; end < text.size(); ++end)
    if ((text[end] & 0xC0) != 0x80 && columns-- == 0) break;
  return text.substr(0, end);
}

}  // namespace

namespace detail {

std::string clock_text(double seconds) {
  if (!(seconds >= 0) || seconds > 359999) return "?";
  const auto s = static_cast<long long>(std::llround(seconds));
  char text[64];
  if (s >= 3600)
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
  else
    std::snprintf(text, sizeof text, "%lld:%02lld", s / 60, s % 60);
  return text;
}

std::string short_number(double value) {
  const char* unit = "";
  for (const char* next : {"k", "M", "G"}) {
    if (!(value >= 999.5)) break;
    value /= 1000;
    unit = next;
  }
  return fixed(value, *unit == '\0' || value >= 99.95 ? 0 : value < 9.995 ? 2 : 1) + unit;
}

std::string bar_line(const std::string& title, double fraction, const std::string& text, int width,
                     bool colour) {
  fraction = std::clamp(fraction, 0.0, 1.0);
  std::string percent = fixed(std::floor(fraction * 100), 0) + "%";
  percent.insert(0, 4 - percent.size(), ' ');
  const std::string rest = percent + "  " + text;
  const int room =
      width - static_cast<int>(columns_of(title) + columns_of(rest)) - 4;  // spaces and brackets
  if (room < kNarrowestBar) return cut(title + " " + rest, static_cast<size_t>(std::max(width, 0)));
  const int cells = std::min(room, kWidestBar);
  const int full = static_cast<int>(fraction * cells);
  std::string bar(static_cast<size_t>(full), '=');
  if (full < cells) bar += '>';
  const std::string space(static_cast<size_t>(cells) - bar.size(), ' ');
  return title + " [" + (colour ? "\x1b[32m" + bar + "\x1b[0m" : bar) + space + "] " + rest;
}

}  // namespace detail

Progress::Progress(std::string title, int64_t steps, ProgressOptions options)
    : title_(std::move(title)),
      steps_(steps),
      options_(options),
      start_(Clock::now()),
      shown_(start_) {
  LOCKSTEP_CHECK(!options_.enabled || options_.out, ValueError,
                 "Progress: out must be an open file");
  if (!options_.enabled) return;
  terminal_ = is_terminal(options_.out);
  colour_ = terminal_ && wants_colour();
}

Progress::~Progress() {
  if (finished_ || !options_.enabled || !terminal_ || done_ == 0) return;
  std::fputc('\n', options_.out);
  std::fflush(options_.out);
}

void Progress::loss(double mean, int64_t samples) {
  if (samples <= 0) return;
  loss_sum_ += mean * static_cast<double>(samples);
  samples_with_loss_ += samples;
}

void Progress::step(int64_t samples, std::optional<double> loss) {
  ++done_;
  samples_ += samples;
  if (loss) this->loss(*loss, samples);
  if (!options_.enabled || finished_) return;
  const auto now = Clock::now();
  const bool first_on_terminal = terminal_ && done_ == 1;
  if (!first_on_terminal &&
      seconds_between(shown_, now) < (terminal_ ? kRedrawSeconds : options_.line_seconds))
    return;
  shown_ = now;
  draw();
}

void Progress::finish() {
  if (finished_) return;
  finished_ = true;
  if (!options_.enabled) return;
  std::fprintf(options_.out, terminal_ ? "\r%s\x1b[K\n" : "%s\n",
               (title_ + "  " + last_text()).c_str());
  std::fflush(options_.out);
}

void Progress::draw() {
  const int64_t all_done = options_.initial + done_;
  const double fraction =
      steps_ > 0 ? static_cast<double>(all_done) / static_cast<double>(steps_) : 1;
  if (terminal_) {
    // One column less: a full line would wrap on some terminals.
    const std::string line =
        detail::bar_line(title_, fraction, text(), width_of(options_.out) - 1, colour_);
    std::fprintf(options_.out, "\r%s\x1b[K", line.c_str());
  } else {
    const std::string percent = fixed(std::floor(100 * std::min(fraction, 1.0)), 0);
    std::fprintf(options_.out, "%s  %s%%  %s\n", title_.c_str(), percent.c_str(), text().c_str());
  }
  std::fflush(options_.out);
}

// "loss 0.1234  12.3k samples/s  0:12 left"
std::string Progress::text() const {
  const double seconds = seconds_between(start_, Clock::now());
  std::string text;
  if (samples_with_loss_ > 0)
    text += str_cat("loss ", fixed(loss_sum_ / static_cast<double>(samples_with_loss_), 4), "  ");
  text += detail::short_number(static_cast<double>(samples_) * options_.samples_factor /
                               std::max(seconds, 1e-9));
  text += " samples/s  ";
  const int64_t steps_left = std::max<int64_t>(steps_ - options_.initial - done_, 0);
  const double left = seconds * static_cast<double>(steps_left) / static_cast<double>(done_);
  return text + detail::clock_text(left) + " left";
}

// "loss 0.1234  60000 samples in 0:12  5.00k samples/s"
std::string Progress::last_text() const {
  const double seconds = seconds_between(start_, Clock::now());
  const double samples = static_cast<double>(samples_) * options_.samples_factor;
  std::string text;
  if (samples_with_loss_ > 0)
    text += str_cat("loss ", fixed(loss_sum_ / static_cast<double>(samples_with_loss_), 4), "  ");
  text += str_cat(fixed(samples, 0), " samples in ",
                  seconds < 10 ? fixed(seconds, 2) + "s" : detail::clock_text(seconds));
  return text + "  " + detail::short_number(samples / std::max(seconds, 1e-9)) + " samples/s";
}

}  // namespace lockstep::data

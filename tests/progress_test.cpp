// Progress: on a pseudo terminal one line redrawn, in a file plain lines, off the main rank
// nothing.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include <lockstep/data/progress.h>

#include "temporary_folder.h"

using namespace lockstep;
using namespace std::chrono_literals;

namespace {

// What is written to a file by f(out).
template <class F>
std::string in_a_file(F f) {
  TemporaryFolder folder;
  std::FILE* out = std::fopen((folder / "log").c_str(), "w");
  f(out);
  std::fclose(out);
  return get_file(folder / "log");
}

// What is written to a terminal of `columns` columns by f(out).
template <class F>
std::string on_a_terminal(int columns, F f) {
  winsize size{};
  size.ws_col = static_cast<unsigned short>(columns);
  size.ws_row = 24;
  int master = -1, slave = -1;
  REQUIRE(::openpty(&master, &slave, nullptr, nullptr, &size) == 0);
  ::fcntl(master, F_SETFL, O_NONBLOCK);
  std::FILE* out = ::fdopen(slave, "w");
  std::string text;
  f(out);
  char buffer[4096];
  for (ssize_t n; (n = ::read(master, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(n));
  std::fclose(out);
  ::close(master);
  return text;
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    ++n;
  return n;
}
bool contains(const std::string& text, const std::string& part) { return count(text, part) > 0; }

// Sets an environment variable for a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old, had_ = true;
    ::setenv(name, value, 1);
  }
  ~Environment() { had_ ? ::setenv(name_, old_.c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

void run(std::FILE* out, int steps, bool enabled = true) {
  data::Progress progress{"epoch 1/3", steps, {.enabled = enabled, .out = out}};
  for (int i = 0; i < steps; ++i) progress.step(64, 0.5);
  progress.finish();
  progress.finish();
}

}  // namespace

TEST_CASE("clock_text and short_number") {
  using namespace data::detail;
  CHECK(clock_text(0) == "0:00");
  CHECK(clock_text(7.4) == "0:07");
  CHECK(clock_text(59.6) == "1:00");
  CHECK(clock_text(754) == "12:34");
  CHECK(clock_text(3723) == "1:02:03");
  CHECK(clock_text(NAN) == "?");
  CHECK(clock_text(INFINITY) == "?");
  CHECK(short_number(0) == "0");
  CHECK(short_number(812.4) == "812");
  CHECK(short_number(999.6) == "1.00k");
  CHECK(short_number(12345) == "12.3k");
  CHECK(short_number(123456) == "123k");
  CHECK(short_number(999999) == "1.00M");
  CHECK(short_number(1.25e6) == "1.25M");
}

TEST_CASE("bar_line fits the width") {
  using data::detail::bar_line;
  CHECK(bar_line("e 1", 0.5, "rest", 40, false) == "e 1 [===========>           ]  50%  rest");
  CHECK(bar_line("e 1", 0.0, "rest", 26, false) == "e 1 [>        ]   0%  rest");
  CHECK(bar_line("e 1", 1.0, "rest", 26, false) == "e 1 [=========] 100%  rest");
  CHECK(bar_line("e 1", 0.5, "rest", 26, true) == "e 1 [\x1b[32m====>\x1b[0m    ]  50%  rest");
  CHECK(bar_line("e 1", 0.5, "rest", 20, false) == "e 1  50%  rest");  // no room for a bar
  CHECK(bar_line("e 1", 0.5, "rest", 8, true) == "e 1  50%");
  CHECK(bar_line("e 1", 7, "rest", 26, false).find("100%") != std::string::npos);
  for (int width = 0; width < 120; ++width)
    for (double f : {0.0, 0.3, 0.999, 1.0})
      REQUIRE(bar_line("epoch 1/3", f, "loss 0.1", width, false).size() <=
              static_cast<size_t>(width));
}

TEST_CASE("bar_line cuts between characters, and counts them instead of bytes") {
  using data::detail::bar_line;
  const std::string title = "\xC3\xA4\xE2\x82\xAC";  // two columns in five bytes
  CHECK(bar_line(title, 0.5, "rest", 25, false) == title + " [====>    ]  50%  rest");
  CHECK(bar_line(title, 0.5, "rest", 1, false) == "\xC3\xA4");
  CHECK(bar_line(title, 0.5, "rest", 2, false) == title);
  CHECK(bar_line(title, 0.5, "rest", 0, false).empty());
}

TEST_CASE("Progress: a loss that is NaN, infinite or huge") {
  for (const auto& [loss, text] : {std::pair<double, std::string>{NAN, "loss nan  "},
                                   {INFINITY, "loss inf  "},
                                   {-1e300, "loss -1.0000e+300  "},
                                   {1e14, "loss 100000000000000.0000  "}}) {
    const double value = loss;
    const std::string log = in_a_file([&](std::FILE* out) {
      data::Progress progress{"epoch", 2, {.out = out, .line_seconds = 0}};
      progress.step(1, value);
      progress.finish();
    });
    CHECK_MESSAGE(count(log, text) == 2, log);
  }
}

TEST_CASE("Progress: losses of several batches told at once weigh as many samples") {
  const std::string log = in_a_file([](std::FILE* out) {
    data::Progress progress{"epoch", 3, {.out = out, .line_seconds = 1e9}};
    progress.step(10, 4.0);
    progress.step(10);
    progress.step(10);
    progress.loss(1.0, 20);
    progress.finish();
  });
  CHECK_MESSAGE(count(log, "loss 2.0000  30 samples") == 1, log);
}

TEST_CASE("Progress: a stream that cannot be written costs nothing") {
  std::FILE* out = std::fopen("/dev/full", "w");
  if (!out) return;
  CHECK_NOTHROW(run(out, 100));
  std::fclose(out);
  TemporaryFolder folder;
  out = std::fopen((folder / "log").c_str(), "w");
  ::close(::fileno(out));
  CHECK_NOTHROW(run(out, 100));
  std::fclose(out);
}

TEST_CASE("Progress: a terminal that does not know its width has 80 columns") {
  Environment term("TERM", "xterm"), colour("NO_COLOR", "1");
  const std::string text = on_a_terminal(0, [](std::FILE* out) {
    data::Progress progress{"epoch", 10, {.out = out}};
    progress.step(64, 0.5);
  });
  CHECK_MESSAGE(contains(text, "epoch ["), text);
  CHECK(text.size() <= 79 + std::string("\r\x1b[K\r\n").size());
}

TEST_CASE("Progress: a log gets few lines and no control characters") {
  const std::string text = in_a_file([](std::FILE* out) { run(out, 1000); });
  CHECK(count(text, "\n") == 1);
  CHECK(contains(text, "epoch 1/3  loss 0.5000  64000 samples in 0."));
  CHECK(!contains(text, "\r"));
  CHECK(!contains(text, "\x1b"));

  const std::string lines = in_a_file([](std::FILE* out) {
    data::Progress progress{"epoch", 40, {.out = out, .line_seconds = 0.05}};
    for (int i = 0; i < 40; ++i) {
      std::this_thread::sleep_for(5ms);
      progress.step(10);
    }
    progress.finish();
  });
  CHECK(count(lines, "\n") >= 3);
  CHECK(count(lines, "\n") <= 40 * 5 * 20 / 50);  // far fewer than steps unless the machine stalls
  CHECK(contains(lines, " left\nepoch"));
  CHECK(!contains(lines, "loss"));
  CHECK(lines.find("epoch  400 samples in") != std::string::npos);
}

TEST_CASE("Progress: a terminal gets one line, redrawn, in colour unless told otherwise") {
  Environment term("TERM", "xterm"), colour("NO_COLOR", "");
  const auto slowly = [](std::FILE* out) {
    data::Progress progress{"epoch 1/3", 10, {.out = out}};
    for (int i = 0; i < 10; ++i) {
      progress.step(64, i % 2 ? 1.0 : 0.0);
      std::this_thread::sleep_for(30ms);
    }
    progress.finish();
  };
  const std::string text = on_a_terminal(80, slowly);
  CHECK(count(text, "\n") == 1);
  CHECK(text.back() == '\n');
  CHECK(count(text, "\r") >= 3);
  CHECK(count(text, "\x1b[K") == count(text, "\r") - 1);  // the terminal adds one \r before the \n
  CHECK(contains(text, "\x1b[32m"));
  CHECK(contains(text, "] "));
  CHECK(contains(text, "samples/s  0:0"));
  CHECK(contains(text, "epoch 1/3  loss 0.5000  640 samples in 0."));
  {
    Environment off("NO_COLOR", "1");
    CHECK(!contains(on_a_terminal(80, slowly), "\x1b[32m"));
  }
  {
    Environment dumb("TERM", "dumb");
    CHECK(!contains(on_a_terminal(80, slowly), "\r\x1b"));
    CHECK(!contains(on_a_terminal(80, slowly), "["));
  }
  const std::string narrow = on_a_terminal(30, [](std::FILE* out) {
    data::Progress progress{"epoch 1/3", 10, {.out = out}};
    progress.step(64, 0.5);
  });
  CHECK(narrow.size() <= 29 + std::string("\r\x1b[K\r\n").size());
}

TEST_CASE("Progress: ranks that are not the main one are silent") {
  CHECK(in_a_file([](std::FILE* out) {
          data::Progress progress{"epoch", 2, {.enabled = false, .out = out, .line_seconds = 0}};
          progress.step(1);
          progress.finish();
        }) == "");
  Environment term("TERM", "xterm");
  CHECK(on_a_terminal(80, [](std::FILE* out) { run(out, 100, false); }) == "");
  data::Progress nowhere{"epoch", 1, {.enabled = false, .out = nullptr}};
  nowhere.step(1);
  nowhere.finish();
  CHECK_THROWS_AS((data::Progress{"epoch", 1, {.out = nullptr}}), ValueError);
}

TEST_CASE("Progress: an exception leaves the cursor on a line of its own") {
  Environment term("TERM", "xterm");
  const std::string text = on_a_terminal(80, [](std::FILE* out) {
    try {
      data::Progress progress{"epoch", 10, {.out = out}};
      progress.step(1);
      throw std::runtime_error("stop");
    } catch (const std::runtime_error&) {
    }
  });
  CHECK(text.substr(text.size() - 2) == "\r\n");
  CHECK(count(text, "\n") == 1);
}

TEST_CASE("Progress: samples of all ranks, no samples, and no steps known") {
  const std::string text = in_a_file([](std::FILE* out) {
    data::Progress progress{"epoch", 1, {.out = out, .samples_factor = 4}};
    progress.step(10, 1.0);
    progress.step(0, NAN);  // an empty batch weighs nothing
    progress.finish();
  });
  CHECK(contains(text, "loss 1.0000  40 samples in"));
  const std::string empty = in_a_file([](std::FILE* out) {
    data::Progress progress{"epoch", 0, {.out = out, .line_seconds = 0}};
    progress.step(3);
    progress.finish();
  });
  CHECK(contains(empty, "100%"));
  CHECK(in_a_file([](std::FILE* out) {
          data::Progress{"epoch", 1, {.out = out}}.finish();
        }).find("0 samples in 0.00s") != std::string::npos);
}

TEST_CASE(
    "Progress: a resumed run shows how much of the whole is done, and counts its own samples") {
  const std::string text = in_a_file([](std::FILE* out) {
    data::Progress progress{"epoch 1", 8, {.out = out, .line_seconds = 0, .initial = 5}};
    progress.step(10);
    progress.step(10);
    progress.step(10);
    progress.finish();
  });
  CHECK(text.find("epoch 1  75%  ") != std::string::npos);
  CHECK(text.find("epoch 1  100%  ") != std::string::npos);
  CHECK(text.find("epoch 1  12%") == std::string::npos);
  CHECK(text.find("0:00 left") != std::string::npos);
  CHECK(text.find("30 samples in") != std::string::npos);
}

// Progress: how far an epoch is: a bar on a terminal, redrawn in place, or periodic lines in a log.
// It writes to the stream that it is given, and nothing where it is not enabled.
//
//   data::Progress progress{"epoch 1/3", loader.size(), {.enabled = group.is_main()}};
//   for (auto [x, y] : loader.epoch(0)) { ...; progress.step(x.size(0), loss.item<double>()); }
//   progress.finish();
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include <lockstep/tensor/error.h>

namespace lockstep::data {

struct ProgressOptions {
  bool enabled = true;        // false on ranks that are not the main one
  std::FILE* out = stderr;    // a bar if it is a terminal, lines if not
  double line_seconds = 5;    // in a log: at most one line in so many seconds, and one at the end
  double samples_factor = 1;  // the number of ranks, if step() gets one rank's samples
  int64_t initial = 0;        // steps of the whole that were done before, in a resumed run
};

class LOCKSTEP_API Progress {
 public:
  /// `steps`: how many calls of step() make the whole.
  Progress(std::string title, int64_t steps, ProgressOptions options = {});
  /// Leaves the cursor on a fresh line, also when an exception passes through.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// One batch is done. The loss shown is the mean over the samples whose loss was told: here, or by
  /// loss(), for several batches at once, since reading a loss waits for its device.
  void step(int64_t samples, std::optional<double> loss = std::nullopt);
  void loss(double mean, int64_t samples);
  /// The last line, with totals; later calls do nothing.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  std::string text() const;
  std::string last_text() const;
  void draw();

  std::string title_;
  int64_t steps_;
  ProgressOptions options_;
  bool terminal_ = false, colour_ = false, finished_ = false;
  Clock::time_point start_, shown_;
  int64_t done_ = 0, samples_ = 0, samples_with_loss_ = 0;
  double loss_sum_ = 0;
};

namespace detail {

/// "0:07", "12:34", "1:02:03".
LOCKSTEP_API std::string clock_text(double seconds);
/// "812", "12.3k", "1.25M": three digits of a rate.
LOCKSTEP_API std::string short_number(double value);
/// "title [=====>    ] 45% text", cut to `width` columns; the bar takes the space that is left, and
/// goes first.
LOCKSTEP_API std::string bar_line(const std::string& title, double fraction,
                                  const std::string& text, int width, bool colour);

}  // namespace detail
}  // namespace lockstep::data

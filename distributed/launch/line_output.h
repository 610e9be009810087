// LineOutput: copies one stream of one rank to the launcher's own output, line by line, each with
// the rank's prefix; copies it to a log file; and keeps the last lines for the report of a failure.
//
// Lines of up to 4 MiB are written whole. A longer one is written in several, cut between two
// characters of UTF-8, and each part but the last ends with a mark.
#pragma once

#include <deque>
#include <string>
#include <string_view>

#include <lockstep/distributed/fd.h>
#include <lockstep/distributed/launch/outlet.h>

namespace lockstep::dist {

class LineOutput {
 public:
  /// Reads from `pipe`; writes to `to`, or nowhere if it is null, and to `log` if it is open.
  LineOutput(Fd pipe, Outlet* to, std::string prefix, Fd log);

  int pipe() const { return pipe_.get(); }
  /// Whether what it writes to has room.
  bool has_room() const { return !to_ || !to_->congested(); }
  /// Takes one piece of what the pipe has. False at its end.
  bool pump();
  /// Takes what is there now, without waiting for more, and writes out an unfinished last line.
  void finish();
  /// The last lines, without prefix.
  /// (and of each at most the first 2000 bytes).
  const std::deque<std::string>& last_lines() const { return last_; }

 private:
  void take(std::string_view text);
  void write_log(std::string_view text);
  void put(std::string_view line);
  void put_begin_of_line();

  Fd pipe_;
  Outlet* to_;
  std::string prefix_;
  Fd log_;
  std::string line_;  // without its end yet
  std::deque<std::string> last_;
};

}  // namespace lockstep::dist

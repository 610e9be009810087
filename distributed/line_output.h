// LineOutput: one stream of one rank on its way to the launcher's own: whole lines, each written at
// once behind the rank's prefix, a copy in a log file, and the last lines kept for the report of a
// failure.
#pragma once

#include <deque>
#include <string>
#include <string_view>

#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

class LineOutput {
 public:
  /// Reads from `pipe`; writes to the descriptor `to`, or nowhere if it is -1, and to `log` if it
  /// is open.
  LineOutput(Fd pipe, int to, std::string prefix, Fd log);

  int pipe() const { return pipe_.get(); }
  int to() const { return to_; }
  /// Takes one piece of what the pipe has. False at its end.
  bool pump();
  /// Takes all that is there without waiting, and writes out an unfinished last line.
  void finish();
  /// The last lines, without prefix.
  const std::deque<std::string>& last_lines() const { return last_; }

 private:
  void take(std::string_view text);
  void put(std::string_view line);

  Fd pipe_;
  int to_;
  std::string prefix_;
  Fd log_;
  std::string line_;  // without its end yet
  std::deque<std::string> last_;
};

/// Writes all of it, waiting where the descriptor would block; gives up silently when nobody reads
/// any more.
void write_all(int fd, std::string_view text);

}  // namespace lockstep::dist

// launch: starts one program as N ranks on this host and looks after them to the end. One event
// loop waits for signals, output and deaths; nothing is polled at intervals.
//
// The first failure wins: it is reported with the rank's last lines, the others are stopped, and
// its exit code is the launcher's. Each rank leads a process group, and a watchdog process kills
// the groups should the launcher die, so nothing outlives it (a process that leaves its rank's
// group is out of reach).
#pragma once

#include <string>
#include <vector>

namespace lockstep::dist {

struct LaunchOptions {
  std::vector<std::string> command;  // the program, found by PATH, and its arguments
  int ranks = 1;
  bool prefix = true;        // "[rank] " before each line of output
  std::string log_dir = {};  // each rank's output goes to DIR/attempt_0/rank_R.out and .err too
  std::vector<int> filter_ranks = {};  // whose output is shown; empty: everybody's
  double grace = 5;                    // seconds between SIGTERM and SIGKILL
  bool dry_run = false;                // print environments and command lines only
  int master_port = 0;                 // 0: a free one
};

/// Runs the ranks and returns the exit code: 0, the first failing rank's code, or 128 + its signal.
/// Blocks SIGCHLD and the signals it forwards, in this process. Call from a program with one
/// thread. Throws DistError when it cannot start the program.
int launch(const LaunchOptions& options);

}  // namespace lockstep::dist

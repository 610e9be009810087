// launch: starts one program as the ranks of this node and looks after them to the end. One event
// loop waits for signals, output and deaths; nothing is polled at intervals.
//
// The first failure wins: it is reported with the rank's last lines, the others are stopped, and
// its exit code is the launcher's, unless all are started once more. Each rank leads a process
// group, and a watchdog process kills the groups should the launcher die, so nothing outlives it (a
// process that leaves its rank's group is out of reach).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/distributed/launch/processors.h>

namespace lockstep::dist {

struct LaunchOptions {
  std::vector<std::string> command;  // the program, found by PATH, and its arguments
  int ranks = 1;                     // on each node
  int nodes = 1, node_rank = 0;      // hosts, each with a launcher of its own; this one's number
  std::string master_addr = {};      // where rank 0 is; empty on one node: this host
  int master_port = 0;               // 0 on one node: a free one
  std::string run_id = {};   // empty: a new one, on several nodes made from master's address
  int max_restarts = 0;      // how often all ranks start again after a failure; one node
  bool prefix = true;        // "[rank] " before each line of output
  std::string log_dir = {};  // output goes to DIR/attempt_K/rank_R.out and .err too
  bool show_out = true, show_err = true;  // which of the streams in log files are shown as well
  std::vector<int> filter_ranks = {};     // whose output is shown; empty: everybody's
  Bind bind = Bind::none;                 // the processors of each rank
  double grace = 5;                       // seconds between SIGTERM and SIGKILL
  bool dry_run = false;                   // print environments and command lines only

  int world_size() const { return nodes * ranks; }
  std::chrono::milliseconds grace_period() const {
    return std::chrono::milliseconds(static_cast<int64_t>(1000 * std::min(grace, 1e6)));
  }
};

/// Runs the ranks and returns the exit code: 0, the first failing rank's code, or 128 + its signal.
/// Blocks SIGCHLD and the signals it forwards, in this process. Call from a program with one
/// thread. Throws ValueError when the options do not fit together or the machine, DistError when it
/// cannot start the program.
int launch(const LaunchOptions& options);

}  // namespace lockstep::dist

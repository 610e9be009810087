// LaunchJob: what all attempts of one launch share: its options and plan, the launcher's signals
// and output, the watchdog.
#pragma once

#include <lockstep/distributed/launch/outlet.h>
#include <lockstep/distributed/launch/plan.h>
#include <lockstep/distributed/launch/signals.h>
#include <lockstep/distributed/launch/watchdog.h>

namespace lockstep::dist {

class LaunchJob {
 public:
  explicit LaunchJob(const LaunchOptions& options);
  /// Waits until all output is written or a signal comes; after an interruption, for as long as
  /// ranks have to end.
  ~LaunchJob();
  LaunchJob(const LaunchJob&) = delete;
  LaunchJob& operator=(const LaunchJob&) = delete;

  const LaunchOptions& options;
  const LaunchPlan plan;
  const LaunchSignals signals;
  const Watchdog watchdog;
  Outlet out, err;
  bool interrupted = false;  // a signal has told the launcher to end
};

}  // namespace lockstep::dist

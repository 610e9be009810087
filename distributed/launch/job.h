// LaunchJob: what all attempts of one launch share: options, plan, signals, output, watchdog.
#pragma once

#include <sys/resource.h>

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
  /// In a child: the limit of open descriptors as we found it; the launcher's own is the highest
  /// that it may have, since each rank takes three.
  void restore_limits() const;

  const LaunchOptions& options;
  const LaunchPlan plan;
  const LaunchSignals signals;
  const Watchdog watchdog;
  Outlet out, err;
  bool interrupted = false;  // a signal has told the launcher to end

 private:
  rlimit descriptors_before_{};
};

}  // namespace lockstep::dist

// LaunchSignals: the signals that concern a launcher, as a descriptor for its event loop: deaths of
// children, and those that it forwards to its ranks.
#pragma once

#include <signal.h>

#include <optional>

#include <lockstep/distributed/fd.h>

namespace lockstep::dist {

class LaunchSignals {
 public:
  /// Blocks them in this process from here on, and ignores SIGPIPE and SIGXFSZ. A signal that we
  /// were started with ignored stays so, as nohup and a shell's background jobs want it. Throws
  /// DistError.
  LaunchSignals();

  int fd() const { return fd_.get(); }
  /// The next one that has arrived, if any. Does not wait.
  std::optional<int> next() const;
  /// In a child: gives the program that it will become the signals as we found them.
  void restore() const;

  /// Whether this signal ends a job, rather than being for the program to interpret.
  static bool ends_the_job(int signal);

 private:
  Fd fd_;
  sigset_t before_;
  sighandler_t pipe_before_, file_size_before_, child_before_;
};

}  // namespace lockstep::dist

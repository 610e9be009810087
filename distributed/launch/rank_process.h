// RankProcess: one rank of one attempt: a child that leads a process group of its own, and its
// output on the way to the launcher's own.
#pragma once

#include <sys/types.h>

#include <vector>

#include <lockstep/distributed/launch/job.h>
#include <lockstep/distributed/launch/line_output.h>

namespace lockstep::dist {

class RankProcess {
 public:
  /// Returns when the program has started. Throws DistError when it cannot, IoError when there can
  /// be no log file.
  RankProcess(LaunchJob& job, const RankPlan& plan, int attempt);
  /// Kills the group, if it is still there.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return rank_; }
  pid_t pid() const { return pid_; }
  bool is_over() const { return over_; }
  /// Those of stdout and stderr that come through the launcher.
  std::vector<LineOutput>& outputs() { return outputs_; }
  const std::vector<LineOutput>& outputs() const { return outputs_; }

  /// To all of its group.
  void send(int signal) const;
  /// Becomes readable when the leader ends; -1 where the kernel has no such descriptors.
  int death() const { return death_.get(); }
  /// Whether the leader has ended and is not reaped yet.
  bool has_died() const;
  /// Kills the rest of the group, reaps the leader and takes the last output. Returns the status of
  /// waitpid.
  int kill_and_reap();

 private:
  void open_output(LaunchJob& job, int attempt, int stream, Fd* child_end);
  [[noreturn]] void become(const LaunchJob& job, const RankPlan& plan, const Fd (&streams)[2],
                           int status) const;

  const Watchdog& watchdog_;
  int rank_;
  pid_t pid_ = -1;
  Fd death_;  // a pidfd
  bool over_ = false;
  std::vector<LineOutput> outputs_;
};

}  // namespace lockstep::dist

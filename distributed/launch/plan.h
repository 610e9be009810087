// What a launch will do, before it does anything: names, ports, the token, and each rank's
// variables and processors.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/launch/launcher.h>

namespace lockstep::dist {

/// What is decided once for all attempts of a job.
struct LaunchPlan {
  std::string run_id;
  std::string token;          // empty: the ranks inherit the user's, or have none
  std::vector<Place> places;  // of each local rank
};

/// Throws ValueError when options do not fit together; DistError without randomness.
LaunchPlan make_plan(const LaunchOptions& options);

/// What one process is to be.
struct RankPlan {
  int rank = 0;                        // among all nodes' ranks
  std::vector<std::string> variables;  // "NAME=value": Lockstep's own, torchrun's, and, unless the
                                       // user set them, the numbers of threads
  std::vector<int> processors;         // to be bound to; empty: not bound
};

/// The ranks of one attempt on this node. Takes a free port where the options name none.
std::vector<RankPlan> plan_ranks(const LaunchOptions& options, const LaunchPlan& plan, int attempt);

/// One line per rank: its variables and the command, as a shell would take them. The token is left
/// out.
std::string plan_text(const LaunchOptions& options, const std::vector<RankPlan>& ranks);

/// Whether the user has given ranks a token in LOCKSTEP_TOKEN.
bool user_has_token();

}  // namespace lockstep::dist

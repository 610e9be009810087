// What a launch will do, before it does anything: variables, run id, port.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/launcher.h>

namespace lockstep::dist {

/// How many processors this process may use.
int processors();

/// A fresh secret for LOCKSTEP_TOKEN: it goes to the ranks by their environment, never by a command
/// line, and is no part of the plan that is shown.
std::string make_token();

/// The variables that a rank is given, "NAME=value": Lockstep's own, torchrun's, and, unless the
/// user set them, the numbers of threads: processors / ranks.
std::vector<std::string> rank_variables(const LaunchOptions& options, int rank,
                                        const std::string& run_id);

/// A name for this launch that no other has.
std::string make_run_id();
/// A TCP port of the loopback that nobody listens on now.
int free_port();
/// One line per rank: its variables and the command, as a shell would take them.
std::string plan_text(const LaunchOptions& options, const std::string& run_id);

}  // namespace lockstep::dist

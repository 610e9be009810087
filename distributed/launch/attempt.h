// One attempt: all ranks of this node from their start to their end.
#pragma once

#include <lockstep/distributed/launch/job.h>

namespace lockstep::dist {

/// Starts the ranks and returns when all have ended: 0, the first failing rank's exit code, or 128 +
/// its signal. Reports that first failure and stops the others; a signal to the launcher stops all
/// and sets job.interrupted. A rank that a failure elsewhere has reached (failure_note.h) counts as
/// first only if no other fails within the grace period. Throws DistError when a rank cannot be
/// started; none is left then.
int run_attempt(LaunchJob& job, int attempt);

}  // namespace lockstep::dist

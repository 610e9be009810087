// run_on_main: what only rank 0 does, such as writing a file, with every rank learning how it went.
#pragma once

#include <functional>

#include <lockstep/distributed/group.h>

namespace lockstep::dist {

/// Runs f on rank 0 while the others wait. If it throws, rank 0 rethrows that, and every other rank
/// throws a DistError with its text; so all ranks go on, or none. A collective call.
LOCKSTEP_API void run_on_main(const Group& group, const std::function<void()>& f);

}  // namespace lockstep::dist

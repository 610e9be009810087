// run_local: ranks as threads of this process. The same collectives as between processes, for tests
// and for trying things out.
//
//   dist::run_local(4, [](dist::Group group) { ... });
#pragma once

#include <functional>

#include <lockstep/distributed/group.h>

namespace lockstep::dist {

struct LocalOptions {
  Milliseconds timeout = std::chrono::minutes(30);  // of every collective
};

/// Runs f once per rank, each in its own thread with its own group, which is that thread's default
/// group, and its own generator, a copy of the caller's. Returns when all are done. When one
/// throws, the others' collectives fail; rethrown here is the first exception that is no DistError,
/// if there is one, since another rank's failure may be behind a DistError.
LOCKSTEP_API void run_local(int world_size, const std::function<void(Group)>& f,
                            LocalOptions options = {});

}  // namespace lockstep::dist

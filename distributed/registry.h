// The backends by name. A vendor adds its own by registering a factory; nothing else needs to know.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/distributed/environment.h>
#include <lockstep/distributed/group.h>

namespace lockstep::dist {

/// Joins the ranks that `env` speaks of and returns this rank's side. Called by init(),
/// collectively.
using BackendFactory = std::function<std::shared_ptr<ProcessGroup>(const Environment& env,
                                                                   const InitOptions& options)>;

/// Adds or replaces a backend. Thread-safe.
LOCKSTEP_API void register_backend(const std::string& name, BackendFactory factory);
/// The names known now, sorted.
LOCKSTEP_API std::vector<std::string> backends();
/// The group for an environment: by the named backend or, without a name, "single" for one rank,
/// "shm" for several on one host, "shm+gloo" for several hosts. Throws DistError for a name that is not registered.
LOCKSTEP_API std::shared_ptr<ProcessGroup> make_group(const Environment& env,
                                                      const InitOptions& options);

}  // namespace lockstep::dist

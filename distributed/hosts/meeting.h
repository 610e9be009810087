// How ranks come to a group when shared memory alone does not reach all of them: they meet over TCP,
// say on which host they are, and connect.
#pragma once

#include <lockstep/distributed/environment.h>
#include <lockstep/distributed/group.h>

namespace lockstep::dist {

/// The backend "gloo": all ranks over Gloo, wherever they are.
std::shared_ptr<ProcessGroup> make_flat_group(const Environment& env, const InitOptions& options);
/// The backend "shm+gloo"; "shm" if they turn out to be on one host.
std::shared_ptr<ProcessGroup> make_host_group(const Environment& env, const InitOptions& options);

}  // namespace lockstep::dist

// The processor time that a container or a service manager grants this process: control groups
// (cgroups) of version 2 and 1.
#pragma once

#include <filesystem>

#include <lockstep/tensor/export.h>

namespace lockstep::detail {

/// How many threads can run all the time under the quotas of this process's control groups and their
/// ancestors: the smallest quota, rounded up, at least 1; INT_MAX where there is none. `membership`
/// lists the groups that the process is in, `mount` is where the kernel shows them.
LOCKSTEP_API int cpu_quota(const std::filesystem::path& membership = "/proc/self/cgroup",
                       const std::filesystem::path& mount = "/sys/fs/cgroup");

}  // namespace lockstep::detail

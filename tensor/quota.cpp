#include <lockstep/tensor/quota.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <fstream>
#include <string>

namespace lockstep::detail {
namespace fs = std::filesystem;
namespace {

/// How many threads a quota keeps busy: processor time per period, rounded up. Version 1 has a file for
/// each of the two numbers, version 2 one for both. A time of "max" (version 2) or -1 (version 1) is no
/// limit.
int threads_for(std::istream& time_file, std::istream& period_file) {
  int64_t time = -1, period = 0;
  if (!(time_file >> time && period_file >> period) || time <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::min<int64_t>(INT_MAX, (time - 1) / period + 1));
}

}  // namespace

int cpu_quota(const fs::path& membership, const fs::path& mount) {
  int threads = INT_MAX;
  std::ifstream lines(membership);
  // HIERARCHY:CONTROLLERS:/PATH. The path is the host's and may be absent from a container's mount,
  // whose root is then the group itself.
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || second + 2 > line.size()) continue;
    const std::string controllers = ',' + line.substr(first + 1, second - first - 1) + ',';
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    fs::path group = line.substr(second + 2);
    while (true) {
      if (unified) {
        std::ifstream file(mount / group / "cpu.max");
        threads = std::min(threads, threads_for(file, file));
      } else {
        std::ifstream time(mount / "cpu" / group / "cpu.cfs_quota_us"),
            period(mount / "cpu" / group / "cpu.cfs_period_us");
        threads = std::min(threads, threads_for(time, period));
      }
      if (group.empty()) break;
      group = group.parent_path();
    }
  }
  return threads;
}

}  // namespace lockstep::detail

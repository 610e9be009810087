// Which processors a rank gets: all that the launcher may use, an equal share of the cores, or one
// memory node's (lockstep-run --bind). The kernel's description of the machine is read from sysfs.
#pragma once

#include <string>
#include <vector>

namespace lockstep::dist {

enum class Bind { none, core, numa };

/// What one rank runs on.
struct Place {
  std::vector<int> processors;  // to be bound to; empty: not bound
  int threads = 1;              // its share of them
};

/// The processors that this process may use, in ascending order.
std::vector<int> allowed_processors();

/// The places of `ranks` ranks on these processors. `core` deals them out in contiguous shares, the
/// threads of one core next to each other; ranks share a processor where they are more. `numa` puts
/// contiguous ranks on each memory node that has any of the processors, and binds each rank to all
/// of its node's. `system` is where sysfs has its devices. Throws ValueError when it describes no
/// nodes.
std::vector<Place> places(Bind bind, int ranks, const std::vector<int>& processors,
                          const std::string& system = "/sys/devices/system");

/// "0-3,8" as sysfs writes it, as numbers.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace lockstep::dist

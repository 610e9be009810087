// One test on every backend whose ranks are processes: shm, gloo, and shm+gloo with the ranks split
// over two hosts that are this one.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include <lockstep/distributed/group.h>

#include "ranks.h"
#include "sockets.h"

namespace backends {

using lockstep::dist::Milliseconds;

inline std::vector<std::string> all() {
#ifdef LOCKSTEP_HAS_GLOO
  return {"shm", "gloo", "shm+gloo"};
#else
  return {"shm"};
#endif
}

/// The launch variables of `size` ranks that meet over this backend.
inline ranks::Options on(const std::string& backend, int size, ranks::Options options = {}) {
  options.variables.insert({"TEST_BACKEND", backend});
  if (backend == "shm") return options;
  options.variables.insert({"MASTER_PORT", std::to_string(sockets::Listener().port())});
  options.variables.insert({"MASTER_ADDR", "127.0.0.1"});
  options.variables.insert({"LOCKSTEP_TOKEN", "a secret"});
  if (backend != "shm+gloo") return options;
  const auto host_of = [&](int r) { return r * 2 / size; };
  for (int r = 0; r < size; ++r) {
    int local_rank = 0, local_size = 0;
    for (int other = 0; other < size; ++other) {
      if (host_of(other) != host_of(r)) continue;
      ++local_size;
      if (other < r) ++local_rank;
    }
    auto& own = options.of_rank[r];
    own.insert({"LOCKSTEP_HOST_ID", std::to_string(host_of(r))});
    own.insert({"LOCAL_RANK", std::to_string(local_rank)});
    own.insert({"LOCAL_WORLD_SIZE", std::to_string(local_size)});
  }
  return options;
}

inline std::vector<ranks::Ended> run(const std::string& backend, int size,
                                     const std::string& test_case, ranks::Options options = {}) {
  return ranks::run_ranks(size, test_case, on(backend, size, std::move(options)));
}

/// On a rank that run() has started.
inline lockstep::dist::Group join(Milliseconds timeout = std::chrono::seconds(60)) {
  const std::string backend = std::getenv("TEST_BACKEND");
  auto group = lockstep::dist::init({.backend = backend, .timeout = timeout});
  ranks::require(group.backend() == backend, "another backend");
  return group;
}

}  // namespace backends

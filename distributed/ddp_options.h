// The options of DistributedDataParallel: PyTorch's names and defaults.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/comm_hook.h>

namespace lockstep::dist {

struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;   // MiB of gradients in a bucket
  double first_bucket_mb = 1;  // the first to be ready is small, so that reduction starts early
  bool find_unused_parameters = false;  // parameters may stay without gradient on some ranks
  bool broadcast_buffers =
      true;  // rank 0's buffers reach the others in every synchronised backward
  bool static_graph =
      false;                // every step uses the parameters that the first one used, rank by rank
  bool init_sync = true;    // verify the module and broadcast rank 0's values at construction
  CommHook comm_hook = {};  // in place of the all-reduce of each bucket
  std::vector<std::string> ignored = {};  // parameters and buffers that DDP leaves alone
};

struct JoinOptions {
  /// Gradients are averaged over all ranks; otherwise over those that still have inputs.
  bool divide_by_initial_world_size = true;
  /// All ranks throw once the first has no more inputs.
  bool throw_on_early_termination = false;

  bool operator==(const JoinOptions&) const = default;
};

}  // namespace lockstep::dist

// CommHook: what DistributedDataParallel runs in place of its all-reduce, bucket by bucket: to
// compress what travels, or to average in another way.
//
//   net = {Net{}, group, {.comm_hook = [](dist::GradBucket& b) {
//     return b.group->all_reduce(b.buffer, dist::ReduceOp::avg);
//   }}};
#pragma once

#include <functional>
#include <vector>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

/// A bucket whose gradients are all there.
struct GradBucket {
  int index = 0;  // in the order of launch
  bool is_last = false;
  Tensor buffer;  // [elements], this rank's gradients, not averaged; padded with
                  // zeros between parameters
  std::vector<Tensor> gradients = {};   // views of buffer, shaped like the parameters
  std::vector<Tensor> parameters = {};  // to which they belong
  ProcessGroup* group = nullptr;        // DDP's own communicator
};

/// Returns the work after whose wait() buffer holds the mean over all ranks. It may write buffer at
/// once. Called in the same order on all ranks; whatever it communicates must be ordered alike too:
/// launch before it returns, or when its work is waited for (buckets are waited for in order).
using CommHook = std::function<WorkPtr(GradBucket& bucket)>;

}  // namespace lockstep::dist

// SyncBatchNorm: batch norm whose training batch is what all ranks hold together, as if one process
// had it all. Ranks may hold different numbers of samples, also none.
//
//   Net net;
//   dist::convert_sync_batchnorm(net, group);
//   dist::DistributedDataParallel ddp{std::move(net), group};
#pragma once

#include <lockstep/distributed/group.h>
#include <lockstep/nn/module.h>

namespace lockstep::dist {

/// Makes every BatchNorm1d and BatchNorm2d in net share its training batch with the other ranks;
/// evaluation stays local, parameters, buffers and their names stay as they are. Returns how many
/// there are. A collective call: the modules get one communicator of their own, so their
/// collectives are separate from DDP's and the user's. The ranks must then run the same modules in
/// the same order, forward and backward.
///
/// Forward is one all_gather of counts, means and variances (f64), backward one all_reduce. The
/// gradients of weight and bias are this rank's part; DDP averages them. A batch with fewer than two
/// values per channel on all ranks together is a ShapeError on every rank.
LOCKSTEP_API int convert_sync_batchnorm(nn::Module& net, const Group& group);

}  // namespace lockstep::dist

// How many GPUs the ranks would see, asked of the driver without linking to it.
#pragma once

namespace lockstep::dist {

/// The number of CUDA devices that this process may see (CUDA_VISIBLE_DEVICES counts), 0 where
/// there is no driver. A child asks, since a process that has started CUDA should not fork.
int cuda_devices();

}  // namespace lockstep::dist

#include <lockstep/distributed/ddp/sync_flag.h>

#include <utility>

#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

void SyncFlag::forward_starts() {
  flag_ = depth_ > 0 ? Flag::local : Flag::sync;
  flag_versions_ = versions_();
}

bool SyncFlag::decide(bool through_forward) {
  if (forced_) return *forced_;
  if (flag_ == Flag::unset || (!through_forward && flag_versions_ != versions_())) {
    if (!std::exchange(had_unwrapped_backward_, true))
      warn(
          "DDP: a backward reached the module's parameters without a forward through "
          "DistributedDataParallel since they last changed; its gradients stay on rank ",
          rank_, "; call the wrapper, not the inner module");
    return false;
  }
  const bool local = flag_ == Flag::local;
  if ((depth_ > 0) != local && !std::exchange(warned_scope_, true))
    warn("DDP: forward ran ", local ? "inside" : "outside", " no_sync and backward ",
         local ? "outside" : "inside", "; the forward decides, so the gradients are ",
         local ? "not reduced" : "reduced");
  return !local;
}

}  // namespace lockstep::dist

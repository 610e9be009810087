#include <lockstep/distributed/join.h>

#include <lockstep/nn/batch_norm.h>

namespace lockstep::dist {

Joined::Joined(Reducer& reducer, nn::Module& module, JoinOptions options) : reducer_(reducer) {
  for (const auto& [name, part] : module.named_modules()) {
    const auto* norm = dynamic_cast<const nn::BatchNorm*>(part);
    LOCKSTEP_CHECK(
        !norm || !norm->reduction, DistError, "DDP: join: ", name.empty() ? "the module" : name,
        " is a BatchNorm that shares its batch between ranks (convert_sync_batchnorm), "
        "which a rank without inputs cannot take part in; give all ranks as many batches");
  }
  reducer_.set_join(options);
  // A rank that is done shadows DDP's traffic and no other: the peers would wait for it in vain.
  reducer_.users_group().forbid(
      "inside join only DistributedDataParallel communicates; call it after join, or on a group of "
      "its own");
}

Joined::~Joined() {
  reducer_.users_group().forbid({});
  reducer_.set_join(std::nullopt);
  if (finished_) return;
  try {
    reducer_.abort("a rank left join by an exception" + reducer_.users_group().failure_text());
  } catch (...) {
    // The exception under way is the one to report.
  }
}

void Joined::finish() {
  try {
    while (reducer_.shadow_round()) {
    }
    reducer_.broadcast_module(reducer_.last_active());
  } catch (...) {
    finished_ = true;  // a fault that all ranks found alike leaves the group usable
    throw;
  }
  finished_ = true;
}

}  // namespace lockstep::dist

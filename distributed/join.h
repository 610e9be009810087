// Joined: the scope of DistributedDataParallel::join, for ranks that run out of inputs at different
// times. A rank that is done shadows the others: it takes part in each of their rounds with zeros,
// until nobody has inputs any more; then all take over the model of the last that trained.
#pragma once

#include <lockstep/distributed/reducer.h>
#include <lockstep/nn/module.h>

namespace lockstep::dist {

/// Throws DistError for a module with a BatchNorm that shares its batch with other ranks: a rank that is
/// done cannot shadow what a layer exchanges.
LOCKSTEP_API void check_joinable(nn::Module& module);

class LOCKSTEP_API Joined {
 public:
  Joined(Reducer& reducer, JoinOptions options);
  /// Left without finish(), by an exception, it ends the others' work as well.
  ~Joined();
  Joined(const Joined&) = delete;
  /// This rank has no more inputs. Returns when no rank has.
  void finish();

 private:
  Reducer& reducer_;
  bool finished_ = false;
};

}  // namespace lockstep::dist

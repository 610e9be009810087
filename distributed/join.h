// Joined: the scope of DistributedDataParallel::join, for ranks that run out of inputs at different
// times. A rank that is done shadows the others: it takes part in each of their rounds with zeros,
// until no rank has inputs; then the model of the last rank that trained is broadcast.
#pragma once

#include <lockstep/distributed/ddp/reducer.h>
#include <lockstep/nn/module.h>

namespace lockstep::dist {

class LOCKSTEP_API Joined {
 public:
  /// Throws DistError when the module has a synchronised batch norm: a rank that is done makes none
  /// of its collectives.
  Joined(Reducer& reducer, nn::Module& module, JoinOptions options);
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

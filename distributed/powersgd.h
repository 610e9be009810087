// PowerSGD: a comm hook that sends matrices of low rank in place of gradients. Each gradient M
// [n, m] becomes P Q^T, P [n, r] and Q [m, r] by one step of power iteration over all ranks; what
// that leaves out is added to the next step's gradient. Source: Vogels, Karimireddy and Jaggi,
// "PowerSGD: Practical low-rank gradient compression for distributed optimization", NeurIPS 2019;
// options, names and numbers are PyTorch's.
//
//   dist::PowerSGD powersgd{{.matrix_approximation_rank = 2}};
//   DistributedDataParallel net{Net{}, group, {.comm_hook = powersgd}};
//   save_safetensors(path, powersgd.state_dict());          // one file per rank: errors differ
#pragma once

#include <lockstep/distributed/comm_hook.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::dist {

struct PowerSGDOptions {
  int64_t matrix_approximation_rank = 1;
  int64_t start_powerSGD_iter = 1000;  // steps that average plainly before
  double min_compression_rate = 2;     // a gradient that would shrink by less is averaged plainly
  bool use_error_feedback = true;
  bool warm_start = true;                // Q starts from the last step's; else from random numbers
  double orthogonalization_epsilon = 0;  // added to the norms that columns are divided by
  uint64_t random_seed = 0;              // of Q; the same on all ranks
};

/// A handle: copies, and so the hook that DDP keeps, share one state. Use it for one module, from
/// one thread.
///
/// The state belongs to parameters, not to buckets, so DDP may rebuild those: parameters are counted
/// in the order in which the hook first meets them, which is the same in every run of one program. A
/// gradient that is not finite passes as it is and empties its parameter's memory. A column of zeros
/// stays one; the next step draws it anew.
class LOCKSTEP_API PowerSGD {
 public:
  /// Throws ValueError for a rank below 1, or a negative step, rate or epsilon.
  explicit PowerSGD(PowerSGDOptions options = {});
  /// The hook itself: two collectives per bucket, f32 or f64. The second is launched when the work
  /// is waited for, so that until then is_completed() is false.
  WorkPtr operator()(GradBucket& bucket) const;

  const PowerSGDOptions& options() const;
  /// Steps so far, counted by their last buckets.
  int64_t iteration() const;

  /// Elements so far since start_powerSGD_iter, as they are and as they were sent.
  struct CompressionStats {
    int64_t numel_before = 0, numel_after = 0;
  };
  CompressionStats compression_stats() const;

  /// "iteration" (0-d, i64), and for parameter k "error.k" [n, m], which differs between ranks, and
  /// "q.k" [m, r], which does not; copies.
  NamedTensors state_dict() const;
  /// Takes the place of the whole state. An error or q that is missing starts as zeros or random
  /// numbers. ValueError: no iteration, a name that is none of these, or a tensor that is not a
  /// matrix; the hook throws ShapeError or DTypeError when the tensor does not fit its gradient.
  void load_state_dict(const NamedTensors& state);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::dist

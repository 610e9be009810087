// Accumulation: one optimizer step from several micro-batches on each of several ranks, exact for
// ragged batches, ignored targets and short windows: W ranks with k micro-batches of any sizes give
// the gradient of the mean over one big batch.
//
//   dist::Accumulation acc{net, group, {.steps = 4}};
//   for (auto [x, y] : loader.epoch(epoch)) {
//     acc.backward(cross_entropy(net(x), y, {.reduction = Reduction::sum}), y.size(0));
//     acc.step(optimizer);          // steps at the end of each window
//   }
//   acc.step(optimizer, true);      // the short window at the end of the epoch
#pragma once

#include <exception>
#include <memory>

#include <lockstep/distributed/data_parallel.h>
#include <lockstep/optim/optimizer.h>

namespace lockstep::dist {

struct AccumulationOptions {
  int64_t steps = 1;  // micro-batches a window, on each rank
};

/// While it lives it, and not the forward, decides which backward is synchronised: the last of a
/// window. It must be destroyed before the wrapper that it was made for.
class LOCKSTEP_API Accumulation {
 public:
  /// A collective call. Throws ValueError on every rank where the ranks' `steps` differ.
  template <class M>
  Accumulation(DistributedDataParallel<M>& net, Group group, AccumulationOptions options = {})
      : Accumulation(net.reducer(), net.parameters(), std::move(group), options) {}
  /// Warns within a window.
  ~Accumulation();
  Accumulation(const Accumulation&) = delete;

  /// Backward of one micro-batch: `loss_sum` is the sum, not the mean, over its `count` targets
  /// (0 is legal; gradients of such a batch are zero). Gradients cleared within a window are an
  /// Error of the next call. After an exception, here or in step(), the window's gradients are
  /// cleared and the next micro-batch begins a window. Where the other ranks had a part in the
  /// backward that threw they throw as well, with what to do; else they wait, and this rank's next
  /// window takes the place of the one that failed.
  void backward(const Tensor& loss_sum, int64_t count);

  /// At the end of a window: turns the gradients into those of the mean over all its targets on all
  /// ranks, steps, clears the gradients and returns true. Within a window it does nothing and
  /// returns false. `close`, once on every rank at the end of an epoch, ends a window that has begun,
  /// and takes part with nothing in what other ranks still have.
  bool step(optim::Optimizer& optimizer, bool close = false);
  /// The first half of step(): true where the gradients are ready, to be clipped, say; step the
  /// optimizer and clear the gradients then. To close, go on until it is false.
  bool finish(bool close = false);

  /// The mean loss of the last finished window over all its targets on all ranks; waits for its device.
  double mean_loss() const { return mean_loss_.defined() ? mean_loss_.item<double>() : 0; }
  /// Its number of targets.
  int64_t count() const { return count_; }
  /// Micro-batches of the window under way.
  int64_t position() const { return position_; }

 private:
  Accumulation(Reducer* reducer, std::vector<Tensor> parameters, Group group,
               AccumulationOptions options);
  void check_same_steps() const;
  void add_loss(const Tensor& loss_sum);
  void sum_over_ranks();
  void drop_window();
  void check_gradients_kept();
  void average(double targets);

  Reducer* reducer_;
  std::vector<Tensor> parameters_;
  std::vector<Tensor> accumulated_;  // those with a gradient after the last micro-batch
  Group group_;
  int64_t steps_, position_ = 0;
  double targets_ = 0;  // of this rank, in the window under way
  Tensor loss_;         // so far, 0-d, f64, where the losses are
  Tensor sums_;         // targets and micro-batches of all ranks
  WorkPtr work_;        // that sums them,
  WorkPtr loss_work_;   // and the loss
  Tensor mean_loss_;    // of the last window, 0-d
  int64_t count_ = 0;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace lockstep::dist

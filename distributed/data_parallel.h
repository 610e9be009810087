// DistributedDataParallel: trains one module on many ranks. It starts every rank from rank 0's
// values, and a backward through it returns with each gradient averaged over all ranks; buckets of
// gradients are reduced while the rest of backward still runs.
//
//   dist::DistributedDataParallel net{Net{}, dist::init()};
//   cross_entropy(net(x), y).backward();        // every rank now holds the same gradients
//
// Gradient accumulation: run forward and backward of all micro-batches but the last under
// no_sync().
//   { auto guard = net.no_sync();  loss(net(x1)).backward(); }   // stays on this rank
//   loss(net(x2)).backward();                                    // reduces both, once
// At world size 1 the wrapper attaches nothing and costs nothing, unless a comm hook is set.
#pragma once

#include <memory>

#include <lockstep/distributed/ddp/reducer.h>
#include <lockstep/distributed/group.h>
#include <lockstep/distributed/join.h>
#include <lockstep/nn/module.h>
#include <lockstep/tensor/random.h>

namespace lockstep::dist {

/// While it lives, forwards through the wrapper lead to backwards that stay on this rank.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(Reducer* reducer) : reducer_(reducer) {
    if (reducer_) reducer_->flag().no_sync(+1);
  }
  ~NoSyncGuard() {
    if (reducer_) reducer_->flag().no_sync(-1);
  }
  NoSyncGuard(const NoSyncGuard&) = delete;

 private:
  Reducer* reducer_;
};

/// One forward through the wrapper. While it lives, this thread draws random numbers (dropout masks)
/// from the rank's own stream.
class ForwardScope {
 public:
  ForwardScope(Reducer& reducer, int rank, bool training) : reducer_(reducer) {
    reducer_.forward_starts(training);
    stream_before_ = std::exchange(default_generator().state().stream, static_cast<uint64_t>(rank));
  }
  ~ForwardScope() {
    default_generator().state().stream = stream_before_;
    reducer_.forward_ends();
  }
  ForwardScope(const ForwardScope&) = delete;

 private:
  Reducer& reducer_;
  uint64_t stream_before_;
};

template <class M>
class DistributedDataParallel {
 public:
  /// Takes the module over. Throws DistError on every rank when the ranks' modules differ.
  DistributedDataParallel(M&& module, Group group, DistributedDataParallelOptions options = {})
      : owned_(std::make_unique<M>(std::move(module))), module_(owned_.get()) {
    connect(group, std::move(options));
  }
  /// Wraps a module that lives elsewhere, at least as long as this.
  DistributedDataParallel(M& module, Group group, DistributedDataParallelOptions options = {})
      : module_(&module) {
    connect(group, std::move(options));
  }

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    if (!reducer_) return (*module_)(std::forward<Args>(args)...);
    try {
      const ForwardScope scope(*reducer_, rank_, module_->is_training());
      return (*module_)(std::forward<Args>(args)...);
    } catch (...) {
      reducer_->remember_failure("forward");
      throw;
    }
  }

  M& module() { return *module_; }
  std::vector<Tensor> parameters() const { return module_->parameters(); }
  NamedTensors named_parameters() const { return module_->named_parameters(); }
  NamedTensors named_buffers() const { return module_->named_buffers(); }
  /// Names without any prefix: files are interchangeable with the bare module's.
  NamedTensors state_dict() const { return module_->state_dict(); }
  nn::LoadResult load_state_dict(const NamedTensors& state, nn::LoadOptions options = {}) {
    return module_->load_state_dict(state, options);
  }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  bool is_training() const { return module_->is_training(); }
  void zero_grad(bool set_to_none = true) { module_->zero_grad(set_to_none); }

  /// `on` = false makes a guard that does nothing: `auto guard = net.no_sync(!last_of_window);`
  [[nodiscard]] NoSyncGuard no_sync(bool on = true) {
    return NoSyncGuard(on ? reducer_.get() : nullptr);
  }
  /// Makes every rank's buffers (running statistics) rank 0's. A collective call; backward does it
  /// as well.
  void sync_buffers() {
    if (reducer_) reducer_->sync_buffers();
  }
  /// Runs `body`, the training loop, in which ranks may have different numbers of inputs: a rank
  /// whose body has returned takes part in the others' reductions with zeros, and at the end all have
  /// the model of the last. Inside it no other collective may use the group, so no SyncBatchNorm
  /// either. An exception of a rank's body ends the others' too.
  template <class Body>
  void join(Body&& body, JoinOptions options = {}) {
    if (!reducer_) return body();
    Joined scope(*reducer_, *module_, options);
    body();
    scope.finish();
  }
  /// Averages what local backwards have accumulated, now and without a backward. A collective call.
  void reduce_now() {
    if (reducer_) reducer_->reduce_now();
  }
  /// What the last synchronised backward did; all zero at world size 1.
  DdpStats stats() const { return reducer_ ? reducer_->stats() : DdpStats{}; }
  /// The implementation, for dist::Accumulation; null where nothing is attached.
  Reducer* reducer() const { return reducer_.get(); }

 private:
  void connect(const Group& group, DistributedDataParallelOptions options) {
    nn::external(*module_);
    if (group.size() == 1 && !options.comm_hook) return;
    rank_ = group.rank();
    reducer_ = std::make_unique<Reducer>(
        group.shared(), [m = module_] { return m->named_parameters(); },
        [m = module_] { return m->named_buffers(); }, std::move(options));
  }

  std::unique_ptr<M> owned_;
  M* module_;
  int rank_ = 0;
  std::unique_ptr<Reducer> reducer_;
};

}  // namespace lockstep::dist

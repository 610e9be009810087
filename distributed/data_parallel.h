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
// At world size 1 the wrapper attaches nothing and costs nothing.
#pragma once

#include <memory>

#include <lockstep/distributed/group.h>
#include <lockstep/distributed/reducer.h>
#include <lockstep/nn/module.h>
#include <lockstep/tensor/random.h>

namespace lockstep::dist {

/// While it lives, forwards through the wrapper lead to backwards that stay on this rank.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(Reducer* reducer) : reducer_(reducer) {
    if (reducer_) reducer_->no_sync(+1);
  }
  ~NoSyncGuard() {
    if (reducer_) reducer_->no_sync(-1);
  }
  NoSyncGuard(const NoSyncGuard&) = delete;

 private:
  Reducer* reducer_;
};

/// While it lives, this thread's random draws (dropout masks) belong to a rank.
class RankStream {
 public:
  explicit RankStream(int rank)
      : before_(std::exchange(default_generator().stream, static_cast<uint64_t>(rank))) {}
  ~RankStream() { default_generator().stream = before_; }
  RankStream(const RankStream&) = delete;

 private:
  uint64_t before_;
};

template <class M>
class DistributedDataParallel {
 public:
  /// Takes the module over. Throws DistError on every rank when the ranks' modules differ.
  DistributedDataParallel(M&& module, Group group, DistributedDataParallelOptions options = {})
      : owned_(std::make_unique<M>(std::move(module))), module_(owned_.get()) {
    connect(group, options);
  }
  /// Wraps a module that lives elsewhere, at least as long as this.
  DistributedDataParallel(M& module, Group group, DistributedDataParallelOptions options = {})
      : module_(&module) {
    connect(group, options);
  }

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    if (!reducer_) return (*module_)(std::forward<Args>(args)...);
    reducer_->forward_starts();
    const RankStream ranks_draw_differently(rank_);
    return (*module_)(std::forward<Args>(args)...);
  }

  M& module() { return *module_; }
  std::vector<Tensor> parameters() const { return module_->parameters(); }
  nn::NamedTensors named_parameters() const { return module_->named_parameters(); }
  nn::NamedTensors named_buffers() const { return module_->named_buffers(); }
  /// Names without any prefix: files are interchangeable with the bare module's.
  nn::NamedTensors state_dict() const { return module_->state_dict(); }
  nn::LoadResult load_state_dict(const nn::NamedTensors& state, nn::LoadOptions options = {}) {
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
  /// What the last synchronised backward did; all zero at world size 1.
  DdpStats stats() const { return reducer_ ? reducer_->stats() : DdpStats{}; }

 private:
  void connect(const Group& group, DistributedDataParallelOptions options) {
    if (group.size() == 1) return;
    rank_ = group.rank();
    reducer_ = std::make_unique<Reducer>(
        group.shared(), module_->named_parameters(), [m = module_] { return m->named_buffers(); },
        options);
  }

  std::unique_ptr<M> owned_;
  M* module_;
  int rank_ = 0;
  std::unique_ptr<Reducer> reducer_;
};

}  // namespace lockstep::dist

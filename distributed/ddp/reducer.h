// Reducer: the implementation of DistributedDataParallel. It watches a module's leaves, launches the
// reduction of each bucket as soon as backward has filled it, and returns from backward with every
// gradient averaged. A round is one synchronised backward: launches (reducer.cpp), then its end
// (reducer_end.cpp), where all ranks compare their control records and finish the gradients.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/distributed/ddp/bucket.h>
#include <lockstep/distributed/ddp/coalesce.h>
#include <lockstep/distributed/ddp/control_record.h>
#include <lockstep/distributed/ddp/forward_log.h>
#include <lockstep/distributed/ddp/sync_flag.h>
#include <lockstep/distributed/ddp_options.h>
#include <lockstep/distributed/ddp_stats.h>
#include <lockstep/distributed/process_group.h>
#include <lockstep/tensor/node.h>

namespace lockstep::dist {

class LOCKSTEP_API Reducer final : public BackwardWatcher {
 public:
  /// The functions list the module's parameters and buffers as they are at the time of the call, in
  /// registration order, tied ones once. Throws on every rank when the ranks' modules differ.
  Reducer(std::shared_ptr<ProcessGroup> group, std::function<NamedTensors()> current_parameters,
          std::function<NamedTensors()> current_buffers, DistributedDataParallelOptions options);
  ~Reducer() override;

  /// Around each forward of the wrapped module, which decides whether the next backward is
  /// synchronised. `training`: the module is in training mode, so a backward should follow.
  void forward_starts(bool training);
  void forward_ends();
  /// While an exception is handled that is on its way to the program, and maybe past the group.
  void remember_failure(std::string_view where);
  SyncFlag& flag() { return flag_; }
  /// A synchronised backward without a graph: reduces what local backwards left. Parameters that they
  /// did not reach take part with zero, and count as unused; with `counts_as_used` as used, for a rank
  /// that had no batch and so could use none.
  void reduce_now(bool counts_as_used = false);
  /// Runs f once, in the next round, before anything of the round is sent: what f starts on group()
  /// comes before the round's own communication, on every rank. Null takes it back.
  void before_first_launch(std::function<void()> f) { before_first_launch_ = std::move(f); }
  /// The communicator of this wrapper alone.
  ProcessGroup& group() const { return *group_; }
  /// While on, windows of local backwards may differ between ranks, and may leave batches out: their
  /// losses and counts are summed over the ranks.
  void set_exact_windows(bool on) { exact_windows_ = on; }
  /// Multiplies the gradients that the last round reduced.
  void scale_reduced(double factor);
  /// Broadcasts rank 0's buffers now. A collective call.
  void sync_buffers();
  DdpStats stats() const;

  // ---- for join ----

  /// While it has a value, records tell who still has inputs.
  void set_join(std::optional<JoinOptions> options) { join_ = options; }
  /// Takes part in one round with nothing to give; false when no rank had inputs any more.
  bool shadow_round();
  /// The lowest of the ranks that gave gradients last.
  int last_active() const { return last_active_; }
  void broadcast_module(int root);
  void abort(const std::string& text) { group_->abort(text); }
  ProcessGroup& users_group() const { return *users_group_; }

  void backward_runs(std::span<const uint64_t> nodes) override {
    through_forward_ = forward_log_.backward_runs(nodes);
  }
  void backward_starts(std::span<Leaf* const> reached) override;
  void leaf_ready(Leaf& leaf) override;
  void slot_changes(Leaf& leaf) override;
  void backward_ends(bool failed) override;

 private:
  enum class Phase { idle, local, syncing };

  // construction and what may change afterwards
  uint64_t parameter_versions() const;
  uint64_t replica_versions() const;
  void check_slots() const;
  void check_parameters() const;
  void watch(size_t parameter);
  void release(Replicated& parameter);
  void detach_holders(size_t parameter);
  NamedTensors buffers() const;

  // one round
  void reset_round(std::span<Leaf* const> reached);
  ControlRecord record_of_round() const;
  bool posts_records() const;
  void post_record();
  void collect_records();
  [[noreturn]] void fail_about_records(const DistError& e) const;
  void check_graph() const;
  std::string find_replica_fault();
  void choose_compared();
  void launch(size_t bucket);
  WorkPtr reduce(size_t bucket);
  void fill_without_arrival(int parameter);
  void advance();
  void note_standing();
  void forget_failure();
  void abort_backward();

  // its end
  void finish_round();
  void complete_round();
  void remember_graph();
  void exchange_buffers();
  void settle_gradients();
  void check_records();
  void rebuild_buckets();
  void take_buffers();
  void drop_gradients();
  void end_counts();
  int lowest_active() const;
  static double now();  // in seconds

  std::shared_ptr<ProcessGroup> users_group_, group_;  // group_: a communicator of its own
  std::vector<Replicated> parameters_;
  NamedTensors frozen_;            // parameters that did not train when the module was wrapped
  NamedTensors replicated_;        // all parameters that DDP keeps equal
  NamedTensors compared_;          // those that some rank used in the last round, and frozen ones
  std::vector<char> is_compared_;  // by parameter
  RecordNames names_;
  std::function<NamedTensors()> current_parameters_, current_buffers_;
  DistributedDataParallelOptions options_;
  BucketCaps caps_;
  std::vector<Bucket> buckets_;
  std::vector<Tensor> slots_;
  std::vector<int> bucket_of_;
  bool rebuilt_ = false;
  SyncFlag flag_;
  std::optional<JoinOptions> join_;
  bool warned_counts_ = false, warned_unused_ = false, warned_graph_ = false;

  // ---- of the backward under way ----
  Phase phase_ = Phase::idle;
  bool shadowing_ = false;
  int last_active_ = 0;
  uint64_t epoch_ = 0;
  std::vector<char> reached_, arrived_;  // by parameter
  std::vector<int> pending_;             // by bucket: gradients not there yet
  std::vector<int> arrival_order_;
  std::vector<Tensor> kept_;  // by parameter: the gradient that an unused one has in its slot
  size_t next_launch_ = 0;
  std::function<void()> before_first_launch_;
  std::vector<WorkPtr> works_;
  WorkPtr buffer_work_;
  Tensor buffer_bytes_;
  ControlRecord mine_;  // of this rank, this round
  std::vector<std::byte> mine_bytes_;
  std::vector<ControlRecord> records_;  // of all ranks, this round
  std::vector<ControlRecord> first_;    // of the first good round: what a static graph repeats

  // ---- since the last reduction ----
  ForwardLog forward_log_;
  bool logs_forward_ = false;     // the one under way
  bool through_forward_ = false;  // the backward that starts
  uint64_t first_batch_ = 0;
  uint32_t local_backwards_ = 0, forwards_ = 0;
  uint64_t versions_before_ = 0;
  bool exact_windows_ = false;

  // ---- statistics ----
  DdpStats stats_;
  bool traces_fit_ = false;    // stats_.buckets describes the present layout
  size_t next_completed_ = 0;  // works complete in the order of launch
  double forward_started_ = 0, backward_started_ = 0;
  std::vector<double> launched_at_;  // by bucket
};

}  // namespace lockstep::dist

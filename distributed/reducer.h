// Reducer: the machine inside DistributedDataParallel. It watches a module's leaves, launches each
// bucket's all-reduce as soon as backward has filled it, and returns from backward with every
// gradient averaged.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed/bucket.h>
#include <lockstep/distributed/coalesce.h>
#include <lockstep/distributed/control_record.h>
#include <lockstep/distributed/process_group.h>
#include <lockstep/tensor/node.h>

namespace lockstep::dist {

struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;   // MiB of gradients in a bucket
  double first_bucket_mb = 1;  // the first to be ready is small, so that reduction starts early
  bool find_unused_parameters = false;  // parameters may stay without gradient on some ranks
  bool broadcast_buffers =
      true;               // rank 0's buffers reach the others in every synchronised backward
  bool init_sync = true;  // verify the module and broadcast rank 0's values at construction
};

/// What the last synchronised backward did, bucket by bucket, counted in gradients that had
/// arrived.
struct DdpStats {
  struct BucketTrace {
    size_t bytes = 0;
    std::vector<std::string> parameters;
    int launched_after = 0;  // gradients there when its all-reduce was launched
    int completed_after =
        -1;  // gradients there when it was first seen complete; -1: only at the end
  };
  std::vector<BucketTrace> buckets;
  int arrivals = 0;       // gradients that backward produced
  double final_wait = 0;  // seconds spent waiting after backward's last node
  int64_t synchronised_backwards = 0, local_backwards = 0;
  size_t gradient_bytes = 0;  // memory of all buckets
  /// Bytes of buckets that were complete before the last gradient arrived, over all bytes.
  double overlap() const;
};

class LOCKSTEP_API Reducer final : public BackwardWatcher {
 public:
  /// `parameters` and `buffers` in registration order, tied ones once. `current_buffers` lists the
  /// buffers as they are at the time of the call. Throws on every rank when the ranks' modules
  /// differ.
  Reducer(std::shared_ptr<ProcessGroup> group, NamedTensors parameters,
          std::function<NamedTensors()> current_buffers, DistributedDataParallelOptions options);
  ~Reducer() override;

  /// A forward of the wrapped module is about to run: it decides whether the next backward is
  /// synchronised.
  void forward_starts();
  /// Enters (+1) or leaves (-1) a no_sync scope.
  void no_sync(int by) { no_sync_depth_ += by; }
  /// Broadcasts rank 0's buffers now. A collective call.
  void sync_buffers();
  const DdpStats& stats() const { return stats_; }

  void backward_starts(std::span<Leaf* const> reached) override;
  void leaf_ready(Leaf& leaf) override;
  void backward_ends(bool failed) override;

 private:
  enum class Flag { unset, sync, local };
  enum class Phase { idle, local, syncing };

  uint64_t parameter_versions() const;
  void follow_changes();
  void watch(size_t parameter);
  void release(Replicated& parameter);
  void decide_phase();
  void reset_round(std::span<Leaf* const> reached);
  void launch(size_t bucket);
  void fill_without_arrival(int parameter);
  void note_completed();
  void finish_round();
  void settle_gradients(const std::vector<ControlRecord>& records);
  void check_records(const std::vector<ControlRecord>& records);
  void rebuild_buckets();
  void send_buffers();
  void take_buffers();
  void drop_gradients();

  std::shared_ptr<ProcessGroup> group_;
  std::vector<Replicated> parameters_;
  std::function<NamedTensors()> current_buffers_;
  DistributedDataParallelOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<Tensor> slots_;
  std::vector<int> bucket_of_;
  bool rebuilt_ = false;

  Flag flag_ = Flag::unset;
  uint64_t flag_versions_ = 0;
  int no_sync_depth_ = 0;
  bool warned_bypass_ = false, warned_scope_ = false, warned_counts_ = false;

  // ---- of the backward under way ----
  Phase phase_ = Phase::idle;
  uint64_t epoch_ = 0;
  std::vector<char> reached_, arrived_;  // by parameter
  std::vector<char> unreduced_;          // by parameter: holds contributions of local backwards
  std::vector<int> pending_;             // by bucket: gradients not there yet
  std::vector<int> arrival_order_;
  std::vector<Tensor> kept_;  // by parameter: the gradient that an unused one held
  size_t next_launch_ = 0;
  std::vector<WorkPtr> works_;
  WorkPtr buffer_work_;
  Tensor buffer_bytes_;
  uint32_t forwards_ = 0, local_backwards_ = 0;  // since the last reduction
  DdpStats stats_;
};

}  // namespace lockstep::dist

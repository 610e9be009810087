// Group: what training code holds: a handle on a ProcessGroup, cheap to copy, with blocking
// collectives.
//
//   auto group = dist::init();                 // a group of one when no launcher started us
//   group.all_reduce(t);                       // in place, summed over the ranks
//   auto work = group.all_reduce_async(t);     // ... compute ... then work->wait()
//   if (group.is_main()) save(model);
#pragma once

#include <optional>

#include <lockstep/data/shard.h>
#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

class LOCKSTEP_API Group {
 public:
  /// A group of one.
  Group();
  explicit Group(std::shared_ptr<ProcessGroup> group, int local_rank = 0);

  int rank() const { return process_group().rank(); }
  int size() const { return process_group().size(); }
  /// The rank among those on this host: which of its devices to use.
  int local_rank() const { return local_rank_; }
  /// Whether this is rank 0, the one that prints and saves.
  bool is_main() const { return rank() == 0; }
  std::string_view backend() const { return process_group().backend(); }

  // The collectives, each complete when it returns. Shapes and rules are process_group.h's. They
  // throw DistError when a peer is lost, disagrees or is late, DTypeError when op has no meaning for
  // the dtype.

  /// In place; avg is the mean.
  void all_reduce(const Tensor& t, ReduceOp op = ReduceOp::sum,
                  const CollectiveOptions& options = {}) const {
    all_reduce_async(t, op, options)->wait();
  }
  /// In place: every rank's t becomes the root's.
  void broadcast(const Tensor& t, int root = 0, const CollectiveOptions& options = {}) const {
    broadcast_async(t, root, options)->wait();
  }
  /// Into the root's t; the others' stay as they are.
  void reduce(const Tensor& t, int root = 0, ReduceOp op = ReduceOp::sum,
              const CollectiveOptions& options = {}) const {
    process_group().reduce(t, root, op, options)->wait();
  }
  /// [size, ...input's shape], in rank order.
  Tensor all_gather(const Tensor& input, const CollectiveOptions& options = {}) const;
  void all_gather(const Tensor& output, const Tensor& input,
                  const CollectiveOptions& options = {}) const {
    all_gather_async(output, input, options)->wait();
  }
  /// output: this rank's part of the reduction of input, [size, ...output's shape] or as many rows.
  void reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op = ReduceOp::sum,
                      const CollectiveOptions& options = {}) const {
    process_group().reduce_scatter(output, input, op, options)->wait();
  }
  /// On the root what each rank gave, by rank; empty elsewhere.
  std::vector<Tensor> gather(const Tensor& input, int root = 0,
                             const CollectiveOptions& options = {}) const;
  /// output becomes the root's inputs[rank]; inputs are looked at on the root alone.
  void scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root = 0,
               const CollectiveOptions& options = {}) const {
    process_group()
        .scatter(output, rank() == root ? inputs : std::vector<Tensor>(), root, options)
        ->wait();
  }
  /// outputs[r] becomes rank r's inputs[this rank].
  void all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                  const CollectiveOptions& options = {}) const {
    process_group().all_to_all(outputs, inputs, options)->wait();
  }
  void send(const Tensor& t, int to, const CollectiveOptions& options = {}) const {
    process_group().send(t, to, options)->wait();
  }
  void recv(const Tensor& t, int from, const CollectiveOptions& options = {}) const {
    process_group().recv(t, from, options)->wait();
  }
  /// Returns when all ranks have called it.
  void barrier(const CollectiveOptions& options = {}) const { barrier_async(options)->wait(); }

  /// The most used ones, complete when the Work's wait() returns; leave the tensors alone until
  /// then. process_group() has them all.
  WorkPtr all_reduce_async(const Tensor& t, ReduceOp op = ReduceOp::sum,
                           const CollectiveOptions& options = {}) const {
    return process_group().all_reduce(t, op, options);
  }
  WorkPtr broadcast_async(const Tensor& t, int root = 0,
                          const CollectiveOptions& options = {}) const {
    return process_group().broadcast(t, root, options);
  }
  WorkPtr all_gather_async(const Tensor& output, const Tensor& input,
                           const CollectiveOptions& options = {}) const {
    return process_group().all_gather(output, input, options);
  }
  WorkPtr barrier_async(const CollectiveOptions& options = {}) const {
    return process_group().barrier(options);
  }

  /// A group of some of these ranks, in that order; none on the others. A collective call of all
  /// ranks.
  std::optional<Group> new_group(const std::vector<int>& ranks) const;

  /// Completes outstanding work and says goodbye to the other ranks. The last handle does it by
  /// itself.
  void destroy() const { process_group().destroy(); }

  ProcessGroup& process_group() const { return *hold_->group; }
  std::shared_ptr<ProcessGroup> shared() const { return hold_->group; }

  /// Which part of a data set this rank reads.
  operator data::Shard() const { return {rank(), size()}; }

 private:
  friend Group default_group();

  // What the handles share. When an exception unwinds the last of them the group is aborted: the
  // peers must not wait for work that will not come.
  struct Hold {
    std::shared_ptr<ProcessGroup> group;
    bool aborts;
    int exceptions = std::uncaught_exceptions();
    Hold(std::shared_ptr<ProcessGroup> g, bool abort_when_unwound)
        : group(std::move(g)), aborts(abort_when_unwound) {}
    ~Hold();
  };
  explicit Group(std::shared_ptr<Hold> hold, int local_rank)
      : hold_(std::move(hold)), local_rank_(local_rank) {}

  std::shared_ptr<Hold> hold_;
  int local_rank_ = 0;
};

struct InitOptions {
  std::string backend = {};                         // "": the best that serves all ranks
  Milliseconds timeout = std::chrono::minutes(30);  // of every collective
  Milliseconds join_timeout{0};                     // 0: LOCKSTEP_JOIN_TIMEOUT, or 60 s
};

/// Joins the other ranks that the launcher started (see environment.h) and makes the group this
/// thread's default; a group of one when nobody launched us. Throws DistError when ranks are
/// missing at the deadline, when the launch variables make no sense, or when the thread has a
/// default group of several ranks already.
LOCKSTEP_API Group init(const InitOptions& options = {});

/// This thread's group: of init() or run_local(), else a group of one.
LOCKSTEP_API Group default_group();
/// Makes `group` this thread's default; null for none.
LOCKSTEP_API void set_default_group(std::shared_ptr<ProcessGroup> group, int local_rank);

/// The mean of a number over the ranks.
LOCKSTEP_API double mean(double value, const Group& group = default_group());

}  // namespace lockstep::dist

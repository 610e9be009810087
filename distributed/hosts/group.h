// HostGroup, "shm+gloo": ranks on several hosts. Within a host they share memory; between the hosts
// one leader each, the host's first rank, speaks to the others over Gloo. So each byte crosses the
// network once per host, not once per rank.
#pragma once

#include <atomic>
#include <mutex>

#include <lockstep/distributed/children.h>
#include <lockstep/distributed/gloo/plugin.h>
#include <lockstep/distributed/hosts/operation.h>

namespace lockstep::dist {

/// What a HostGroup is made of.
struct HostParts {
  std::shared_ptr<Store> store;
  std::vector<std::vector<int>> hosts;    // the job's ranks by host
  int host = 0, place = 0;                // this rank: hosts[host][place]
  std::shared_ptr<ProcessGroup> gather;   // this host's ranks; null when there is one
  std::shared_ptr<ProcessGroup> spread;   // the same again, for the way back
  std::shared_ptr<ProcessGroup> leaders;  // on leaders: of all hosts; null elsewhere
  std::string leaders_name;               // its name in the store
  std::string address;                    // for further groups over Gloo
  Milliseconds timeout, join_timeout;
};

class LOCKSTEP_API HostGroup final : public ProcessGroup {
 public:
  explicit HostGroup(HostParts parts);
  /// Completes outstanding work and says goodbye; aborts instead while an exception unwinds the
  /// stack.
  ~HostGroup() override;

  std::string_view backend() const override { return "shm+gloo"; }
  int rank() const override;
  int size() const override { return size_; }
  /// send and recv are refused: a group over Gloo (backend gloo, or new_group) has them.
  WorkPtr start(Collective call) override;
  /// A flat group over Gloo.
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) override;
  std::shared_ptr<ProcessGroup> child() override;
  Ref<Storage> allocate(size_t bytes) override;
  void note(std::string_view text) override;
  void progress() override;
  void abort(const std::string& text) override;
  void destroy() override;

  /// The bytes of tensors that this rank has given to each transport.
  struct Traffic {
    uint64_t shm = 0, gloo = 0;
  };
  Traffic traffic() const { return traffic_; }

 private:
  bool leads() const { return parts_.place == 0; }
  int ranks_here() const { return static_cast<int>(here().size()); }
  const std::vector<int>& here() const { return parts_.hosts[static_cast<size_t>(parts_.host)]; }
  int host_of(int rank) const;
  void check_usable(std::string_view what) const;
  void flush();
  std::string notes_name() const { return parts_.leaders_name + "/all"; }
  std::string notes() const;
  void add_notes(Ending& why) const;
  Ending tell_everybody(Ending why, bool within_host);
  void complete_ending(Ending& why, bool within_host) const;
  std::shared_ptr<ProcessGroup> flat();
  GlooSetup gloo_setup(std::string name) const;

  CollectiveOptions to_cross(const CollectiveOptions& options) const;
  CollectiveOptions to_spread(const CollectiveOptions& options) const;
  HostPlan plan(const Collective& call);
  Tensor stacked_inputs(const Collective& call) const;
  HostPlan with_own_part(HostPlan plan, const Tensor& all, const Tensor& output) const;
  void compare(const Collective& call);
  Milliseconds timeout_of(const Collective& call) const;
  HostPlan plan_all_reduce(const Tensor& t, ReduceOp op, const CollectiveOptions& options);
  HostPlan plan_broadcast(const Tensor& t, int root, const CollectiveOptions& options);
  HostPlan plan_all_gather(const Collective& call, bool write);
  HostPlan plan_barrier(const CollectiveOptions& options);

  HostParts parts_;
  int size_ = 0;
  std::shared_ptr<HostEngine> engine_;
  std::mutex flat_mutex_;
  std::shared_ptr<ProcessGroup> flat_;
  uint64_t sequence_ = 0;
  int child_count_ = 0, groups_ = 0;
  Children children_;
  Traffic traffic_;
  std::atomic<bool> destroyed_{false};  // from the beginning of its end
  std::atomic<bool> left_{false};       // and all its work is done
  int exceptions_at_birth_ = std::uncaught_exceptions();
};

}  // namespace lockstep::dist

// Session: the connected ranks of one group, and how they end. Gloo says that a connection broke or
// that time is over; the store says why: who died or left, who aborted, whose call was another one.
// The first rank that knows writes the reason there, and all ranks' errors tell the same.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/gloo/plugin.h>
#include <lockstep/distributed/gloo/watched.h>
#include <lockstep/distributed/peer_error.h>
#include <lockstep/distributed/quiet_thread.h>
#include <lockstep/distributed/store/wait_board.h>

namespace lockstep::dist::gloo_backend {

/// A call as this rank makes it.
struct NumberedCall {
  Collective call;
  uint64_t sequence = 0;  // of point-to-point calls: by pair and direction
  std::string key = {};   // equal where calls agree, and nowhere else
  Clock::time_point deadline = {};
  Milliseconds timeout{0};

  bool point_to_point() const {
    return call.kind == CollectiveKind::send || call.kind == CollectiveKind::recv;
  }
  /// "all_reduce(sum) of f32 [10], sequence number 5"
  std::string bare_text() const;
  /// ... with its label.
  std::string text() const;
};

class Session {
 public:
  /// Connects; a collective call.
  Session(GlooSetup setup, std::shared_ptr<gloo::transport::Device> device);
  ~Session();
  Session(const Session&) = delete;
  /// False in a forked child.
  bool is_here() const { return origin_.is_here(); }
  void check_here(std::string_view what) const { dist::check_here(origin_, what); }

  const GlooSetup& setup() const { return setup_; }
  const std::shared_ptr<gloo::transport::Device>& device() const { return device_; }
  int rank() const { return setup_.rank; }
  int size() const { return static_cast<int>(setup_.ranks.size()); }

  /// Runs a call to its end. Throws DistError.
  void run(const NumberedCall& call);
  /// For those who wait: looks, a few times a second, whether it ended elsewhere.
  void look();
  /// A deadline passed while somebody waited.
  void be_late();
  void abort(const std::string& text);
  /// This rank has begun a call.
  void count(const NumberedCall& call);
  /// For the search for deadlocks: what this rank waits for when it waits for a call.
  BlockedCall blocked_in(const NumberedCall& call) const;
  /// What the others' errors shall say of this rank.
  void note(std::string_view text);
  /// Tells the others that this rank is done, and closes its connections. No call may be under way.
  void leave() noexcept;
  /// Why nothing works any more; its text is empty while it does.
  Ending end() const;

 private:
  void connect(Clock::time_point deadline);
  void compare(const NumberedCall& call);
  Ending explain(const NumberedCall& call, const std::string& what);
  Ending diagnose(const NumberedCall& call, const std::string& what, bool late);
  std::vector<Store::Lost> lost() const;
  Ending who_died(Milliseconds at_least) const;
  Ending who_is_gone() const;
  bool has_left(int rank) const;
  Ending why_nobody_comes() const;
  Ending disagreement(const NumberedCall& call, const std::map<int, std::string>& others) const;
  std::string notes() const;
  Ending conclude(const Ending& why);
  void stop(const Ending& why);
  std::string key(std::string_view what) const { return str_cat(setup_.name, "/", what); }
  std::string key(std::string_view what, int rank) const {
    return str_cat(setup_.name, "/", what, "/", rank);
  }
  int job_rank(int rank) const { return setup_.ranks[static_cast<size_t>(rank)]; }

  Origin origin_;
  GlooSetup setup_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<WatchedContext> context_;
  bool compares_;  // LOCKSTEP_DEBUG=detail
  mutable std::mutex mutex_;
  std::mutex explaining_;
  Ending end_;
  std::string last_completed_ = "nothing";
  bool late_ = false;
  Clock::time_point looked_{};
};

}  // namespace lockstep::dist::gloo_backend

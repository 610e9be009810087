// Session: the connected ranks of one group, and how they end. Gloo says that a connection broke or
// that time is over; the store says why: who died or left, who aborted, whose call was another one.
// The first rank that knows writes the reason there, and all ranks' errors tell the same.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <lockstep/distributed/gloo/plugin.h>
#include <lockstep/distributed/gloo/watched.h>

namespace lockstep::dist::gloo_backend {

using Clock = std::chrono::steady_clock;

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
  /// What the others' errors shall say of this rank.
  void note(std::string_view text);
  /// Tells the others that this rank is done, and closes its connections. No call may be under way.
  void leave() noexcept;
  /// Why nothing works any more; empty while it does.
  std::string end() const;

 private:
  void connect(Clock::time_point deadline);
  void compare(const NumberedCall& call);
  std::string explain(const NumberedCall& call, const std::string& what);
  std::string diagnose(const NumberedCall& call, const std::string& what, bool late);
  std::vector<Store::Lost> lost() const;
  std::string who_died(Milliseconds at_least) const;
  std::string who_is_gone() const;
  bool has_left(int rank) const;
  std::string why_nobody_comes() const;
  std::string disagreement(const NumberedCall& call,
                           const std::map<int, std::string>& others) const;
  std::string notes() const;
  std::string conclude(const std::string& text);
  void stop(const std::string& text);
  std::string key(std::string_view what) const { return str_cat(setup_.name, "/", what); }
  std::string key(std::string_view what, int rank) const {
    return str_cat(setup_.name, "/", what, "/", rank);
  }
  int job_rank(int rank) const { return setup_.ranks[static_cast<size_t>(rank)]; }

  GlooSetup setup_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<WatchedContext> context_;
  bool compares_;  // LOCKSTEP_DEBUG=detail
  mutable std::mutex mutex_;
  std::mutex explaining_;
  std::string end_, last_completed_ = "nothing";
  bool late_ = false;
  Clock::time_point looked_{};
};

/// A thread that takes no signals: a broken connection must not kill the process by SIGPIPE, and the
/// program's handlers are for the program's threads.
template <class F>
std::thread quiet_thread(F f);
/// Runs f, on this thread, with all signals blocked; threads that it starts inherit that.
void with_signals_blocked(const std::function<void()>& f);

template <class F>
std::thread quiet_thread(F f) {
  std::thread thread;
  with_signals_blocked([&] { thread = std::thread(std::move(f)); });
  return thread;
}

}  // namespace lockstep::dist::gloo_backend

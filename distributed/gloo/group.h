// GlooGroup: the ProcessGroup over Gloo. Collectives run one after the other on a thread of the
// group, since Gloo's calls block; what goes to or comes from one rank has a thread of its own, so
// a receive holds up nothing else. Threads start with the first call that needs them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include <lockstep/distributed/children.h>
#include <lockstep/distributed/gloo/session.h>

namespace lockstep::dist::gloo_backend {

class GlooWork final : public Work {
 public:
  GlooWork(std::shared_ptr<Session> session, NumberedCall call)
      : session_(std::move(session)),
        call_(std::move(call)),
        blocked_(session_->blocked_in(call_)),
        outputs_(call_.call.outputs) {}
  void wait(Milliseconds timeout) override;
  bool is_completed() override;
  std::exception_ptr exception() const override;
  uint64_t sequence_number() const override { return call_.sequence; }
  std::vector<Tensor> result() const override { return outputs_; }

  /// On the group's thread.
  void run();
  /// Blocks until it is complete or has failed.
  void finish() { wait_until(call_.deadline, call_.call.options.timeout.count() > 0); }

 private:
  bool done() const;
  /// A wait with a timeout of its own is part of no deadlock.
  void wait_until(Clock::time_point deadline, bool has_timeout);

  std::shared_ptr<Session> session_;
  NumberedCall call_;  // its tensors belong to the thread that runs it
  BlockedCall blocked_;
  std::vector<Tensor> outputs_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
};

/// Works, done in order by one thread.
class Queue {
 public:
  void push(std::shared_ptr<GlooWork> work);
  /// Waits until all is done or has failed, and ends the thread.
  void close();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<GlooWork>> works_;
  std::weak_ptr<GlooWork> last_;  // the newest
  bool closing_ = false;
  std::thread thread_;
};

class GlooGroup final : public ProcessGroup {
 public:
  explicit GlooGroup(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  /// Completes outstanding work and says goodbye; aborts instead while an exception unwinds the
  /// stack.
  ~GlooGroup() override;

  std::string_view backend() const override { return "gloo"; }
  int rank() const override { return session_->rank(); }
  int size() const override { return session_->size(); }
  WorkPtr start(Collective call) override;
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) override;
  std::shared_ptr<ProcessGroup> child() override;
  Ref<Storage> allocate(size_t bytes) override;
  void note(std::string_view text) override;
  void abort(const std::string& text) override;
  void destroy() override;

 private:
  std::shared_ptr<ProcessGroup> make(GlooSetup setup) const;
  void check_usable(std::string_view what) const;
  void leave();

  std::shared_ptr<Session> session_;
  std::mutex mutex_;
  // -1: collectives; else 2 * rank, + 1 for what comes
  std::map<int, std::unique_ptr<Queue>> queues_;
  std::map<int, uint64_t> sequences_;  // by queue
  int groups_ = 0;                     // made from this one
  Children children_;
  std::atomic<bool> destroyed_{false};  // from the beginning of its end
  std::atomic<bool> left_{false};       // and it has said goodbye
  int exceptions_at_birth_ = std::uncaught_exceptions();
};

}  // namespace lockstep::dist::gloo_backend

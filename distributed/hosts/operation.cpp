// The stages' state machine.
#include <lockstep/distributed/hosts/operation.h>

#include <algorithm>
#include <thread>

#include <lockstep/distributed/failure_note.h>

namespace lockstep::dist {

using Clock = std::chrono::steady_clock;

HostOperation::HostOperation(std::shared_ptr<HostEngine> engine, HostPlan plan, Collective call,
                             uint64_t sequence, Milliseconds timeout)
    : engine_(std::move(engine)),
      plan_(std::move(plan)),
      call_(std::move(call)),
      outputs_(call_.outputs),
      sequence_(sequence),
      deadline_(Clock::now() + timeout) {}

bool HostOperation::Stage::look() {
  if (done || !started) return done;
  if (work) {
    if (!work->is_completed()) return false;
    if (const auto error = work->exception()) std::rethrow_exception(error);
    work->wait();  // complete: it runs what then() left
  }
  return done = true;
}

std::string HostOperation::text() const {
  const std::string& label = call_.options.label;
  return str_cat(call_.text(), ", sequence number ", sequence_,
                 label.empty() ? std::string() : str_cat(" (", label, ")"));
}

// What an operation that is over need not keep alive.
void HostOperation::forget() {
  plan_ = {};
  gather_.work = cross_.work = spread_.work = nullptr;
}

void HostOperation::wait(Milliseconds timeout) {
  engine_->wait_for(*this,
                    timeout.count() > 0 ? std::min(deadline_, Clock::now() + timeout) : deadline_);
  if (error_) {
    note_failed_peer();
    std::rethrow_exception(error_);
  }
  run_then();
}

bool HostOperation::is_completed() {
  engine_->advance();
  std::lock_guard lock(engine_->mutex_);
  return over_;
}

std::exception_ptr HostOperation::exception() const {
  std::lock_guard lock(engine_->mutex_);
  return error_;
}

void HostEngine::issue(const std::shared_ptr<HostOperation>& operation) {
  std::lock_guard lock(mutex_);
  LOCKSTEP_CHECK(end_.empty(), DistError, operation->text(), ": ", end_,
                 "; last completed: ", last_completed_);
  operation->gather_.started = true;
  if (operation->plan_.gather) operation->gather_.work = operation->plan_.gather();
  operations_.push_back(operation);
  advance_locked();
}

void HostEngine::advance() {
  std::lock_guard lock(mutex_);
  advance_locked();
}

void HostEngine::advance_locked() {
  bool may_cross = true, may_spread = true, within_host = true;
  try {
    for (const auto& op : operations_) {
      within_host = true;
      const bool gathered = op->gather_.look();
      within_host = false;
      if (gathered && may_cross && !op->cross_.started) {
        op->cross_.started = true;
        if (op->plan_.cross) op->cross_.work = op->plan_.cross();
      }
      may_cross &= op->cross_.started;
      const bool crossed = op->cross_.look();
      if (crossed && may_spread && !op->spread_.started) {
        op->spread_.started = true;
        if (op->plan_.spread) op->spread_.work = op->plan_.spread();
      }
      may_spread &= op->spread_.started;
      within_host = true;
      if (op->spread_.look()) {
        if (op->plan_.finish) op->plan_.finish();
        op->over_ = true;
        last_completed_ = op->text();
        op->forget();
      }
    }
  } catch (const Error& e) {
    return fail(e.what(), within_host);
  }
  std::erase_if(operations_, [](const auto& op) { return op->over_; });
}

void HostEngine::fail(const std::string& text, bool within_host) {
  std::lock_guard lock(mutex_);
  if (end_.empty()) end_ = tell_(text, within_host);
  for (const auto& op : operations_) {
    if (op->over_) continue;
    op->error_ = std::make_exception_ptr(
        DistError(str_cat(op->text(), ": ", end_, "; last completed: ", last_completed_)));
    op->over_ = true;
    op->forget();
  }
  operations_.clear();
}

std::string HostEngine::end() const {
  std::lock_guard lock(mutex_);
  return end_;
}

void HostEngine::wait_for(HostOperation& operation, Clock::time_point deadline) {
  auto pause = std::chrono::microseconds(20);
  for (;;) {
    WorkPtr work;
    bool crosses = false;
    Clock::time_point until = deadline;
    {
      std::lock_guard lock(mutex_);
      advance_locked();
      if (operation.over_) return;
      // Operations end in order, so it is the first one's stage that all wait for.
      const HostOperation& front = *operations_.front();
      crosses = front.gather_.done && !front.cross_.done;
      if (!front.gather_.done) {
        work = front.gather_.work;
      } else if (crosses) {
        work = front.cross_.work;
        until += kCrossGrace;
      } else {
        work = front.spread_.work;
        until += kSpreadGrace;
      }
    }
    const Clock::time_point now = Clock::now();
    if (crosses && now < until) {
      // Another thread, the backend's between the hosts, is at work; this one moves the rest on.
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(500));
      continue;
    }
    try {
      work->wait(std::max(std::chrono::ceil<Milliseconds>(until - now), Milliseconds(1)));
    } catch (const Error& e) {
      fail(e.what(), !crosses);
    }
  }
}

void HostEngine::flush() noexcept {
  try {
    for (;;) {
      std::shared_ptr<HostOperation> last;
      {
        std::lock_guard lock(mutex_);
        if (operations_.empty()) return;
        last = operations_.back();
      }
      wait_for(*last, last->deadline_);
    }
  } catch (const Error&) {
    // The operations' own errors stay in them.
  }
}

}  // namespace lockstep::dist

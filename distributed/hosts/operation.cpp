// The stages' state machine.
#include <lockstep/distributed/hosts/operation.h>

#include <algorithm>
#include <optional>
#include <thread>

#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/store.h>

namespace lockstep::dist {

namespace {

// The engines of this process's groups. A rank that waits in one group must advance the others'
// stages too, or a rank that waits for those would wait for ever.
struct Engines {
  std::mutex mutex;
  std::vector<std::weak_ptr<HostEngine>> all;
};
Engines& engines() {
  static Engines* e = new Engines;  // outlives every static that might use it
  return *e;
}

std::vector<std::shared_ptr<HostEngine>> other_engines(const HostEngine* than) {
  std::lock_guard lock(engines().mutex);
  std::vector<std::shared_ptr<HostEngine>> others;
  std::erase_if(engines().all, [](const auto& e) { return e.expired(); });
  for (const auto& weak : engines().all)
    if (auto engine = weak.lock(); engine && engine.get() != than && engine->is_here())
      others.push_back(std::move(engine));
  return others;
}

}  // namespace

std::shared_ptr<HostEngine> HostEngine::make(Group group) {
  auto engine = std::shared_ptr<HostEngine>(new HostEngine(std::move(group)));
  std::lock_guard lock(engines().mutex);
  engines().all.push_back(engine);
  return engine;
}

HostOperation::HostOperation(std::shared_ptr<HostEngine> engine, HostPlan plan, Collective call,
                             uint64_t sequence, Milliseconds timeout)
    : engine_(std::move(engine)),
      plan_(std::move(plan)),
      call_(std::move(call)),
      outputs_(call_.outputs),
      sequence_(sequence),
      deadline_(deadline_after(timeout)) {}

bool HostOperation::Stage::look() {
  if (done || !started) return done;
  if (work) {
    if (!work->is_completed()) return false;
    if (const auto error = work->exception()) std::rethrow_exception(error);
    work->wait();  // runs what then() left
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
  engine_->check_here(name_of(call_.kind));
  const bool is_given = timeout.count() > 0;
  engine_->wait_for(*this, is_given ? std::min(deadline_, deadline_after(timeout)) : deadline_,
                    is_given || call_.options.timeout.count() > 0);
  if (error_) {
    note_failed_peer();
    std::rethrow_exception(error_);
  }
  run_then();
}

bool HostOperation::is_completed() {
  engine_->check_here(name_of(call_.kind));
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
  if (!end_.text.empty())
    throw PeerError(end_.cause, str_cat(operation->text(), ": ", end_.text,
                                        "; last completed: ", last_completed_));
  group_.store->waits().count(group_.name, operation->sequence_);
  operation->gather_.started = true;
  if (operation->plan_.gather) operation->gather_.work = operation->plan_.gather();
  operations_.push_back(operation);
  advance_locked();
}

void HostEngine::advance() {
  {
    std::lock_guard lock(mutex_);
    advance_locked();
  }
  // One that another thread is advancing needs nobody else.
  for (const auto& engine : other_engines(this))
    if (std::unique_lock lock(engine->mutex_, std::try_to_lock); lock) engine->advance_locked();
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
  } catch (const std::exception& e) {
    return fail_by(e, within_host);
  }
  std::erase_if(operations_, [](const auto& op) { return op->over_; });
}

void HostEngine::fail_by(const std::exception& error, bool within_host) {
  const auto* of_peer = dynamic_cast<const PeerError*>(&error);
  fail({of_peer ? of_peer->cause() : Cause::other, error.what()}, within_host);
}

void HostEngine::fail(const Ending& why, bool within_host) {
  std::lock_guard lock(mutex_);
  if (end_.text.empty()) end_ = group_.tell(why, within_host);
  for (const auto& op : operations_) {
    if (op->over_) continue;
    op->error_ = std::make_exception_ptr(PeerError(
        end_.cause, str_cat(op->text(), ": ", end_.text, "; last completed: ", last_completed_)));
    op->over_ = true;
    op->forget();
  }
  operations_.clear();
}

Ending HostEngine::end() const {
  std::lock_guard lock(mutex_);
  return end_;
}

BlockedCall HostEngine::blocked_in(const HostOperation& operation) const {
  return {group_.name, operation.sequence_, group_.ranks,
          str_cat(operation.text(), ", of group \"", group_.name, "\""), group_.name + "/end"};
}

void HostEngine::wait_for(HostOperation& operation, Clock::time_point deadline, bool has_timeout) {
  std::optional<BlockedStoreWait> blocked;
  if (!has_timeout) blocked.emplace(*group_.store, blocked_in(operation));
  constexpr Milliseconds kLookEvery(200);
  Clock::time_point next_look = Clock::now() + kLookEvery;
  auto pause = std::chrono::microseconds(20);
  for (;;) {
    advance();
    WorkPtr work;
    bool crosses = false;
    Clock::time_point until = deadline;
    {
      std::lock_guard lock(mutex_);
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
    if (now >= until) {
      // The stage itself finds out who is late.
      try {
        work->wait(Milliseconds(1));
      } catch (const std::exception& e) {
        fail_by(e, !crosses);
      }
      continue;
    }
    if (now >= next_look) {
      next_look = now + kLookEvery;
      try {
        if (blocked) blocked->look();  // what it finds is in the store
        if (const auto end = group_.store->try_get(group_.name + "/end"))
          fail(Ending::unpacked(*end));
      } catch (const DistError&) {
        // Without its store a rank notices deaths by the stages alone.
      }
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(500));
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
      wait_for(*last, last->deadline_, last->call_.options.timeout.count() > 0);
    }
  } catch (...) {
    // The operations' own errors stay in them.
  }
}

}  // namespace lockstep::dist

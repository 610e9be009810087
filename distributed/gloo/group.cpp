// From calls to works on queues, and the plug-in's entrance.
#include <lockstep/distributed/gloo/group.h>

#include <gloo/transport/tcp/device.h>

#include <algorithm>

#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/single_group.h>

namespace lockstep::dist::gloo_backend {

// ---- works ----

bool GlooWork::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

void GlooWork::run() {
  std::exception_ptr error;
  try {
    session_->run(call_);
    if (call_.call.deliver) call_.call.deliver();
  } catch (...) {
    error = std::current_exception();
  }
  // Dropped without the mutex: what a tensor's release function does is the user's.
  call_.call.inputs.clear();
  call_.call.outputs.clear();
  call_.call.deliver = nullptr;
  std::lock_guard lock(mutex_);
  error_ = error;
  done_ = true;
  finished_.notify_all();
}

void GlooWork::wait(Milliseconds timeout) {
  session_->check_here(name_of(call_.call.kind));
  wait_until(timeout.count() > 0 ? std::min(call_.deadline, deadline_after(timeout))
                                 : call_.deadline);
  if (error_) {
    note_failed_peer();
    std::rethrow_exception(error_);
  }
  run_then();
}

void GlooWork::wait_until(Clock::time_point deadline) {
  if (done()) return;
  BlockedStoreWait blocked(*session_->setup().store, blocked_);
  std::unique_lock lock(mutex_);
  while (!done_) {
    const auto slice =
        std::clamp<Clock::duration>(deadline - Clock::now(), Milliseconds(1), Milliseconds(100));
    if (finished_.wait_for(lock, slice, [this] { return done_; })) break;
    lock.unlock();
    if (Clock::now() >= deadline)
      session_->be_late();
    else
      session_->look();
    try {
      blocked.look();  // an end that it finds is in the store, where the session looks
    } catch (const DistError&) {
      // Without its store the session finds that rank 0 is gone.
    }
    lock.lock();
  }
}

bool GlooWork::is_completed() {
  session_->check_here(name_of(call_.call.kind));
  if (!done()) {
    if (Clock::now() >= call_.deadline)
      session_->be_late();
    else
      session_->look();
    return done();
  }
  return true;
}

std::exception_ptr GlooWork::exception() const {
  std::lock_guard lock(mutex_);
  return error_;
}

// ---- queues ----

void Queue::push(std::shared_ptr<GlooWork> work) {
  std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  if (!thread_.joinable()) try {
      thread_ = quiet_thread("a thread of backend gloo", [this] { run(); });
    } catch (...) {
      works_.pop_back();
      throw;
    }
  last_ = works_.back();
  changed_.notify_all();
}

void Queue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !works_.empty(); });
    if (works_.empty()) break;
    const std::shared_ptr<GlooWork> work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work->run();
    lock.lock();
  }
}

void Queue::close() {
  std::shared_ptr<GlooWork> last;
  {
    std::lock_guard lock(mutex_);
    last = last_.lock();
  }
  if (last) last->finish();
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// ---- the group ----

GlooGroup::~GlooGroup() {
  if (!session_->is_here()) {  // the threads of the queues are the parent's
    for (auto& [which, queue] : queues_) queue.release();
    return;
  }
  try {
    if (std::uncaught_exceptions() > exceptions_at_birth_)
      abort("it was left by an exception" + failure_text());
    leave();
  } catch (...) {
    // Without a store, or memory, there is no way to tell the other ranks.
  }
}

void GlooGroup::check_usable(std::string_view what) const {
  session_->check_here(what);
  LOCKSTEP_CHECK(!destroyed_, DistError, what, ": the group was destroyed on this rank");
}

WorkPtr GlooGroup::start(Collective call) {
  NumberedCall numbered{.call = std::move(call)};
  const Collective& c = numbered.call;
  const Tensor& model = c.model();
  LOCKSTEP_CHECK(!model.defined() || model.device().is_cpu(), DeviceError, name_of(c.kind),
                 ": this group works on CPU tensors, got one on ", model.device(),
                 "; move it with to(Device{})");
  check_usable(c.text());
  std::lock_guard lock(mutex_);
  const bool sends = c.kind == CollectiveKind::send;
  const int which = numbered.point_to_point() ? 2 * c.root + (sends ? 0 : 1) : -1;
  uint64_t& count = sequences_[which];
  numbered.sequence = count + 1;
  check_usable(numbered.text());
  numbered.timeout = c.options.timeout.count() > 0 ? c.options.timeout : session_->setup().timeout;
  numbered.deadline = deadline_after(numbered.timeout);
  numbered.key = numbered.bare_text();
  if (numbered.point_to_point())  // the same on both sides
    numbered.key = str_cat(numbered.sequence, " from ", sends ? rank() : c.root, " to ",
                           sends ? c.root : rank(), " of ", model.dtype(), ' ', model.shape());
  std::unique_ptr<Queue>& queue = queues_[which];
  if (!queue) queue = std::make_unique<Queue>();
  session_->count(numbered);
  auto work = std::make_shared<GlooWork>(session_, std::move(numbered));
  queue->push(work);
  ++count;  // at last: a call that failed before leaves this rank in step
  return work;
}

std::shared_ptr<ProcessGroup> GlooGroup::make(GlooSetup setup) const {
  if (setup.ranks.size() == 1) return std::make_shared<SingleGroup>();
  // Made by a call of the group, under the group's deadline.
  setup.join_timeout = std::min(setup.join_timeout, setup.timeout);
  return std::make_shared<GlooGroup>(
      std::make_shared<Session>(std::move(setup), session_->device()));
}

std::shared_ptr<ProcessGroup> GlooGroup::child() {
  check_usable("child");
  GlooSetup setup = session_->setup();
  setup.name += str_cat(".", ++groups_);
  return children_.add(make(std::move(setup)));
}

std::shared_ptr<ProcessGroup> GlooGroup::new_group(const std::vector<int>& ranks) {
  check_usable("new_group");
  GlooSetup setup = session_->setup();
  std::vector<int> members;
  int mine = -1;
  for (size_t i = 0; i < ranks.size(); ++i) {
    LOCKSTEP_CHECK(ranks[i] >= 0 && ranks[i] < size(), ValueError, "new_group: there is no rank ",
                   ranks[i], " among ", size());
    LOCKSTEP_CHECK(std::count(ranks.begin(), ranks.end(), ranks[i]) == 1, ValueError,
                   "new_group: rank ", ranks[i], " is named twice");
    if (ranks[i] == rank()) mine = static_cast<int>(i);
    members.push_back(setup.ranks[static_cast<size_t>(ranks[i])]);
  }
  setup.name += str_cat(".", ++groups_);
  setup.ranks = std::move(members);
  setup.rank = mine;
  return make_together(setup, mine >= 0, [this](const GlooSetup& s) { return make(s); });
}

Ref<Storage> GlooGroup::allocate(size_t bytes) {
  check_usable("allocate");
  return ProcessGroup::allocate(bytes);
}

void GlooGroup::note(std::string_view text) {
  if (session_->is_here() && !destroyed_) session_->note(text);
}

void GlooGroup::abort(const std::string& text) {
  if (!session_->is_here() || left_) return;
  const int job_rank = session_->setup().ranks[static_cast<size_t>(rank())];
  session_->abort(str_cat("aborted by rank ", job_rank, ": ", text));
}

void GlooGroup::destroy() {
  if (!session_->is_here()) return;
  children_.destroy();
  leave();
}

void GlooGroup::leave() {
  {
    std::lock_guard lock(mutex_);
    if (destroyed_.exchange(true)) return;
  }
  for (auto& [which, queue] : queues_) queue->close();
  session_->leave();
  left_ = true;
}

namespace {

// A device has one thread.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& address) {
  std::shared_ptr<gloo::transport::Device> device;
  try {
    with_signals_blocked([&] { device = gloo::transport::tcp::CreateDevice(address.c_str()); });
  } catch (const std::exception& e) {
    fail<DistError>("init: Gloo cannot listen at ", address, ": ", e.what());
  }
  count_library_threads(1);
  gloo::transport::Device* raw = device.get();
  return {raw, [device = std::move(device)](gloo::transport::Device*) mutable {
            device.reset();
            count_library_threads(-1);
          }};
}

}  // namespace
}  // namespace lockstep::dist::gloo_backend

extern "C" LOCKSTEP_API std::shared_ptr<lockstep::dist::ProcessGroup> lockstep_gloo_group(
    lockstep::dist::GlooSetup& setup) {
  using namespace lockstep::dist;
  using namespace lockstep::dist::gloo_backend;
  if (setup.ranks.size() == 1) return std::make_shared<SingleGroup>();
  return std::make_shared<GlooGroup>(std::make_shared<Session>(setup, make_device(setup.address)));
}

extern "C" LOCKSTEP_API uint64_t lockstep_gloo_abi() { return lockstep::dist::gloo_abi(); }

// Communicator: the list of operations under way and its ends, good and bad.
#include <lockstep/distributed/shm/communicator.h>

#include <algorithm>

#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/shm/exchange.h>

namespace lockstep::dist {

using std::memory_order_acquire;
using std::memory_order_release;

Communicator::Communicator(std::shared_ptr<Engine> engine, SharedArea area,
                           std::vector<int> members, uint64_t id, std::string name,
                           Milliseconds timeout)
    : engine_(std::move(engine)),
      area_(std::move(area)),
      members_(std::move(members)),
      rank_(static_cast<int>(std::find(members_.begin(), members_.end(), engine_->peers().rank()) -
                             members_.begin())),
      id_(id),
      name_(std::move(name)),
      timeout_(timeout),
      sends_(members_.size()),
      receives_(members_.size()) {
  std::lock_guard lock(engine_->mutex());
  engine_->enlist(this);
}

Communicator::~Communicator() {
  if (!engine_->is_here()) return;
  std::lock_guard lock(engine_->mutex());
  engine_->dismiss(this);
}

void Communicator::check_here(std::string_view what) const {
  dist::check_here(engine_->origin(), what);
}

void Communicator::refuse(std::string_view what) const {
  LOCKSTEP_CHECK(!destroyed_, DistError, what, ": the group was destroyed on this rank");
  note_failed_peer();
  const Ending end = area_.ending();
  throw PeerError(end.cause,
                  str_cat(what, ": ", end.text, "; last completed: ", last_completed_.text()));
}

void Communicator::wait_for(const std::function<bool()>& done,
                            const std::function<Obstacle()>& obstacle,
                            const std::function<void()>& look) {
  engine_->wait(done, look, obstacle, [this](const std::string& text) {
    give_up({Cause::deadlock, text});
  });
}

Obstacle Communicator::obstacle(const std::string& call, const std::vector<int>& missing) const {
  Obstacle all{str_cat(call, ", of ", name_), {}};
  for (const int r : missing) all.missing.push_back(members_[static_cast<size_t>(r)]);
  return all;
}

void Communicator::wake_others() const {
  for (const int peer : members_)
    if (peer != engine_->peers().rank()) wake(engine_->peers().slot(peer).event);
}

TransferCounts& Communicator::transfers(const Call& call) {
  const bool sends = call.is(CollectiveKind::send);
  return (sends ? sends_ : receives_)[static_cast<size_t>(call.root)];
}

bool Communicator::take_outbox(const Operation* sender) {
  if (outbox_ && outbox_ != sender) return false;
  outbox_ = sender;
  return true;
}

// A tensor in memory that all ranks see is used where it lies, where its stream is one piece.
void Communicator::place(Call& call, const Collective& what) {
  allocations_.purge(size());
  const Pattern& pattern = Pattern::of(call);
  if (pattern.parts || !is_among(pattern.offers, rank_, call.root)) return;
  const StridedBytes from(what.inputs[0]);
  if (!from.dense()) return;
  const size_t bytes = static_cast<size_t>(what.inputs[0].numel()) * size_of(call.dtype);
  const Allocations::Place place = allocations_.find(from.data(), bytes, rank_);
  call.allocation = place.id;
  call.offset = place.offset;
}

WorkPtr Communicator::issue(Call call, Collective what) {
  check_here(NamedCall{call, what.options.label}.text());
  std::shared_ptr<Operation> op;
  {
    std::lock_guard lock(engine_->mutex());
    const bool transfers_it = call.is(CollectiveKind::send) || call.is(CollectiveKind::recv);
    // Counted once the operation stands: a call that fails before leaves this rank in step.
    uint64_t& count = transfers_it ? transfers(call).called : sequence_;
    call.sequence = count + 1;
    if (!usable()) refuse(NamedCall{call, what.options.label}.text());
    if (transfers_it) {
      op = std::make_shared<Transfer>(shared_from_this(), call, std::move(what));
    } else {
      place(call, what);
      op = std::make_shared<Exchange>(shared_from_this(), call, std::move(what));
    }
    operations_.push_back(op);
    ++count;
    if (!transfers_it)
      area_.called(rank_).store(count, memory_order_release);
    else if (call.is(CollectiveKind::send))
      area_.pair(rank_, call.root).sends_called.store(count, memory_order_release);
    else
      area_.pair(call.root, rank_).receives_called.store(count, memory_order_release);
  }
  engine_->progress();
  return op;
}

bool Communicator::advance(std::vector<std::shared_ptr<Operation>>& finished) {
  if (operations_.empty()) return false;
  bool moved = false;
  // Looked at first, acted on last: what was there before the poison still completes.
  const bool poisoned = area_.poisoned();
  for (const auto& op : operations_) moved |= op->advance();
  if (moved) wake_others();
  if (poisoned)
    for (const auto& op : operations_)
      if (!op->over()) {
        const Ending end = area_.ending();
        op->fail({end.cause, str_cat(op->named().text(), ": ", end.text,
                                     "; last completed: ", last_completed_.text())});
      }
  std::erase_if(operations_, [&](const std::shared_ptr<Operation>& op) {
    if (!op->over()) return false;
    if (!op->failed()) last_completed_ = op->named();
    finished.push_back(op);
    return true;
  });
  return moved;
}

Ending Communicator::absence(int rank) const {
  if (rank == rank_) return {};
  const int peer = members_[static_cast<size_t>(rank)];
  const std::string who =
      peer == rank ? str_cat("rank ", rank)
                   : str_cat("rank ", rank, " of this group, rank ", peer, " of the job,");
  if (area_.gone(rank).load(memory_order_acquire)) {
    // It may have left for a deadlock, of which the ranks in it are about to tell this group.
    for (const int member : members_)
      if (BlockedWait::is_condemned(engine_->peers(), member)) return {};
    return {Cause::left, str_cat(who, " has left")};
  }
  const std::string why = engine_->peers().lost(peer);
  return why.empty() ? Ending() : Ending{Cause::died, str_cat(who, " ", why)};
}

std::string Communicator::standing(int rank) const {
  uint64_t newest = 0;
  for (uint64_t lane = 0; lane < kLanes; ++lane)
    newest = std::max(newest, area_.mark(lane, rank).arrived.load(memory_order_acquire));
  if (newest == 0) return str_cat("rank ", rank, " has called no collective yet");
  // A call may be read while this rank has not left its lane. Afterwards the other may write the
  // next one there, but what it called is what this rank called.
  const bool left_here = area_.mark(newest, rank_).left.load(memory_order_acquire) >= newest;
  const Call& call = area_.call(newest, left_here ? rank_ : rank);
  const bool completed = area_.mark(newest, rank).left.load(memory_order_acquire) >= newest;
  return str_cat(
      "rank ", rank, completed ? " last completed " : " is in ",
      call.sequence == newest ? NamedCall{call, {}}.text() : str_cat("sequence number ", newest));
}

void Communicator::inspect(Clock::time_point now) {
  for (const auto& op : operations_) {
    for (int r = 0; r < size(); ++r) {
      if (!op->needs(r)) continue;
      const Ending why = absence(r);
      // Asked again: a rank that completed the operation, and then left or died, is not needed any
      // more.
      if (!why.text.empty() && op->needs(r)) return give_up(why);
    }
    if (now >= op->deadline()) return give_up({Cause::late, op->deadline_text()});
  }
}

Clock::time_point Communicator::earliest_deadline() const {
  Clock::time_point earliest = Clock::time_point::max();
  for (const auto& op : operations_) earliest = std::min(earliest, op->deadline());
  return earliest;
}

void Communicator::poison(const Ending& why) {
  area_.poison(rank_, why);
  wake_others();
}

void Communicator::give_up(Ending why) {
  for (int r = 0; r < size(); ++r) {
    const std::string note = area_.note(r).read();
    if (!note.empty()) why.text += str_cat("; rank ", r, ": ", note);
  }
  poison(why);
}

void Communicator::note(std::string_view text) const {
  LOCKSTEP_CHECK(text.size() <= kNoteBytes, ValueError, "note: a note has at most ", kNoteBytes,
                 " bytes, this one has ", text.size());
  if (engine_->is_here() && !destroyed_) area_.note(rank_).write(text);
}

void Communicator::abort(const std::string& text) {
  if (!engine_->is_here() || destroyed_) return;  // in the latter case all have been told goodbye
  {
    std::lock_guard lock(engine_->mutex());
    poison({Cause::aborted, str_cat("aborted by rank ", rank_, ": ", text)});
  }
  engine_->progress();
}

void Communicator::destroy() noexcept {
  if (!engine_->is_here() || destroyed_) return;
  try {
    wait_for(
        [this] {
          std::lock_guard lock(engine_->mutex());
          return operations_.empty();
        },
        [this] { return operations_.empty() ? Obstacle() : operations_.front()->obstacle(); });
  } catch (...) {
    // A callback's exception; an operation's own error stays in its Work.
  }
  if (destroyed_.exchange(true)) return;
  area_.gone(rank_).store(1, memory_order_release);
  wake_others();
}

}  // namespace lockstep::dist

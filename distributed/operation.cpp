// Operation's steps. The order of memory operations is what makes them safe: data, then the count
// that announces it (release); the count (acquire), then the data.
#include <lockstep/distributed/operation.h>

#include <algorithm>

#include <lockstep/distributed/communicator.h>
#include <lockstep/distributed/reduce.h>

namespace lockstep::dist {

using std::memory_order_acquire;
using std::memory_order_release;

Operation::Operation(std::shared_ptr<Communicator> communicator, const Call& call,
                     std::vector<Tensor> keep, StridedBytes source,
                     std::vector<Tensor> outputs, Milliseconds timeout, std::string label)
    : communicator_(std::move(communicator)),
      rank_(communicator_->rank()),
      size_(communicator_->size()),
      call_(call),
      keep_(std::move(keep)),
      source_(source),
      outputs_(std::move(outputs)),
      targets_(outputs_.begin(), outputs_.end()),
      timeout_(timeout),
      deadline_(Clock::now() + timeout),
      label_(std::move(label)) {
  if (call_.kind > CallKind::all_gather) return;
  elements_ = Shape(std::span<const int64_t>(call_.shape, static_cast<size_t>(call_.dims))).numel();
  chunk_elements_ = static_cast<int64_t>(kChunkBytes / size_of(call_.dtype));
  chunks_ = static_cast<uint64_t>((elements_ + chunk_elements_ - 1) / chunk_elements_);
}

void Operation::wait(Milliseconds timeout) {
  if (timeout.count() > 0) {
    std::lock_guard lock(communicator_->engine().mutex());
    if (Clock::now() + timeout < deadline_) {
      deadline_ = Clock::now() + timeout;
      timeout_ = timeout;
    }
  }
  communicator_->engine().wait([this] { return over(); });
  if (failed()) std::rethrow_exception(error_);
  run_then();
}

bool Operation::is_completed() {
  if (!over()) communicator_->engine().progress();
  return over();
}

Mark& Operation::mark(int rank) const { return communicator_->area().mark(call_.sequence, rank); }

uint64_t Operation::offered_by(int rank) const {
  const uint64_t n = mark(rank).offered.load(memory_order_acquire);
  return n > base_ ? n - base_ : 0;
}

uint64_t Operation::least_consumed() const {
  uint64_t least = chunks_;
  for (int r = 0; r < size_; ++r) {
    if (call_.kind == CallKind::broadcast && r == call_.root) continue;
    const uint64_t n = mark(r).consumed.load(memory_order_acquire);
    least = std::min(least, n > base_ ? n - base_ : 0);
  }
  return least;
}

std::byte* Operation::place(int rank, uint64_t chunk) const {
  std::byte* whole = places_[static_cast<size_t>(rank)];
  return whole ? whole + chunk * kChunkBytes
               : communicator_->area().window(call_.sequence, rank, chunk);
}

bool Operation::advance() {
  bool moved = false;
  if (state_ == State::queued) {
    if (!lane_is_free()) return false;
    publish();
    moved = true;
  }
  moved |= offer();
  if (state_ == State::published) {
    if (!all_arrived()) return moved;
    compare();
    if (state_ == State::published) return moved;
    moved = true;
  }
  bool again = chunks_ > 0;
  while (again) {
    again = reduces() ? combine() : false;
    again |= reduces() ? take_combined() : take_offered();
    again |= offer();
    moved |= again;
  }
  if (finished()) complete();
  return moved || over();
}

// A lane is used again only when every rank has left it; until then the operation waits its turn
// here.
bool Operation::lane_is_free() const {
  if (call_.sequence <= kLanes) return true;
  for (int r = 0; r < size_; ++r)
    if (mark(r).left.load(memory_order_acquire) < call_.sequence - kLanes) return false;
  return true;
}

void Operation::publish() {
  communicator_->area().call(call_.sequence, rank_) = call_;
  mark(rank_).arrived.store(call_.sequence, memory_order_release);
  state_ = State::published;
}

bool Operation::all_arrived() const {
  for (int r = 0; r < size_; ++r)
    if (mark(r).arrived.load(memory_order_acquire) < call_.sequence) return false;
  return true;
}

void Operation::compare() {
  const SharedArea& area = communicator_->area();
  places_.assign(static_cast<size_t>(size_), nullptr);
  buffers_.resize(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    const Call& theirs = area.call(call_.sequence, r);
    if (!call_.agrees_with(theirs)) {
      const bool lower = rank_ < r;
      communicator_->poison(str_cat(
          "ranks disagree: rank ", lower ? rank_ : r, " called ", (lower ? call_ : theirs).text(),
          ", rank ", lower ? r : rank_, " called ", (lower ? theirs : call_).text(),
          "; all ranks must call the same collectives in the same order"));
      return;
    }
    if (theirs.allocation)
      places_[static_cast<size_t>(r)] =
          communicator_->allocations().at({theirs.allocation, theirs.offset}, r);
    else
      any_window_ = true;
  }
  state_ = State::agreed;
}

bool Operation::offer() {
  if (offered_ == chunks_ || !offers()) return false;
  uint64_t limit = chunks_;
  if (!direct()) {
    limit = std::min(
        limit, (reduces() ? taken_ : least_consumed()) + communicator_->area().window_chunks());
    for (uint64_t c = offered_; c < limit; ++c)
      source_.read(first(c), count(c), communicator_->area().window(call_.sequence, rank_, c));
  }
  if (limit == offered_) return false;
  offered_ = limit;
  mark(rank_).offered.store(base_ + offered_, memory_order_release);
  return true;
}

bool Operation::combine() {
  Lane& lane = communicator_->area().lane(call_.sequence);
  const uint64_t window = communicator_->area().window_chunks();
  bool moved = false;
  for (;;) {
    uint64_t limit = chunks_;
    for (int r = 0; r < size_; ++r) limit = std::min(limit, offered_by(r));
    uint64_t word = lane.claimed.load(memory_order_acquire);
    if (word & kPoison || word - reduce_base_ >= limit) return moved;
    if (!lane.claimed.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) continue;
    const uint64_t c = word - reduce_base_;
    for (int r = 0; r < size_; ++r) buffers_[static_cast<size_t>(r)] = place(r, c);
    reduce_everywhere(buffers_, static_cast<size_t>(count(c)), call_.dtype, call_.reduce);
    if (any_window_) lane.finished[c % window].store(word + 1, memory_order_release);
    lane.done.fetch_add(1, std::memory_order_acq_rel);
    moved = true;
  }
}

bool Operation::take_combined() {
  if (direct()) return false;
  const Lane& lane = communicator_->area().lane(call_.sequence);
  const uint64_t window = communicator_->area().window_chunks();
  const uint64_t before = taken_;
  while (taken_ < offered_ &&
         lane.finished[taken_ % window].load(memory_order_acquire) == reduce_base_ + taken_ + 1) {
    targets_[0].write(first(taken_), count(taken_), place(rank_, taken_));
    ++taken_;
  }
  return taken_ != before;
}

bool Operation::take_offered() {
  if (!takes()) return false;
  const bool from_all = call_.kind == CallKind::all_gather;
  uint64_t limit = from_all ? chunks_ : offered_by(call_.root);
  if (from_all)
    for (int r = 0; r < size_; ++r) limit = std::min(limit, offered_by(r));
  if (taken_ >= limit) return false;
  for (; taken_ < limit; ++taken_) {
    if (!from_all)
      targets_[0].write(first(taken_), count(taken_), place(call_.root, taken_));
    else
      for (int r = 0; r < size_; ++r)
        targets_[static_cast<size_t>(r)].write(first(taken_), count(taken_), place(r, taken_));
  }
  mark(rank_).consumed.store(base_ + taken_, memory_order_release);
  return true;
}

bool Operation::finished() const {
  if (state_ != State::agreed) return false;
  if (chunks_ == 0) return true;
  if (reduces()) {
    if (!direct()) return taken_ == chunks_;
    return communicator_->area().lane(call_.sequence).done.load(memory_order_acquire) -
               reduce_base_ >=
           chunks_;
  }
  if (takes() && taken_ < chunks_) return false;
  if (!offers()) return true;
  return direct() ? least_consumed() == chunks_ : offered_ == chunks_;
}

void Operation::complete() {
  mark(rank_).left.store(call_.sequence, memory_order_release);
  keep_.clear();
  state_.store(State::complete, memory_order_release);
}

void Operation::fail(const std::string& text) {
  error_ = std::make_exception_ptr(DistError(text));
  keep_.clear();
  state_.store(State::failed, memory_order_release);
}

bool Operation::needs(int rank) const {
  return mark(rank).left.load(memory_order_acquire) < call_.sequence;
}

std::string NamedCall::text() const {
  if (call.sequence == 0) return "nothing";
  return str_cat(call.text(), ", sequence number ", call.sequence,
                 label.empty() ? std::string() : str_cat(" (", label, ")"));
}

std::string Operation::deadline_text() const {
  const auto late = [this](int r) {
    if (state_ == State::queued)
      return mark(r).left.load(memory_order_acquire) + kLanes < call_.sequence;
    return mark(r).arrived.load(memory_order_acquire) < call_.sequence;
  };
  std::string who;
  int ranks = 0;
  for (int r = 0; r < size_; ++r)
    if (late(r)) who += str_cat(ranks++ ? ", " : "", r);
  if (ranks == 0)
    who = "all ranks arrived but not all finished";
  else
    who = str_cat(ranks > 1 ? "ranks " : "rank ", who, " did not arrive");
  return str_cat(who, " within ", timeout_.count(), " ms (rank ", rank_, " waited in ",
                 named().text(), ")");
}

}  // namespace lockstep::dist

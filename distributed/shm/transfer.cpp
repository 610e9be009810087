// Transfer's two sides. The receiver writes what it wants, then the announcement (release); the
// sender reads them in the other order. Chunks go like those of a collective.
#include <lockstep/distributed/shm/transfer.h>

#include <algorithm>

#include <lockstep/distributed/shm/communicator.h>

namespace lockstep::dist {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;

namespace {
bool is_of(uint64_t word, uint64_t sequence) { return word >> 32 == counted(sequence, 0) >> 32; }
}  // namespace

Transfer::Transfer(std::shared_ptr<Communicator> communicator, const Call& call, Collective what)
    : Operation(std::move(communicator), call, std::move(what)),
      bytes_(what_.model()),
      elements_(call.numel()),
      chunks_(chunks_of(elements_, chunk_elements_)) {}

bool Transfer::advance() {
  TransferCounts& counts = communicator_->transfers(call_);
  if (counts.over + 1 != call_.sequence) return false;  // an earlier one is under way
  const bool moved = sends() ? push() : pull();
  if (over()) ++counts.over;
  return moved;
}

// True once the receive is there, agrees, and the outbox is ours.
bool Transfer::begin_sending() {
  if (pair().announced.load(memory_order_acquire) < call_.sequence) return false;
  const uint64_t wanted = pair().wanted.load(memory_order_relaxed);
  const auto dtype = static_cast<DType>(wanted & 0xFF);
  const auto elements = static_cast<int64_t>(wanted >> 8);
  if (dtype != call_.dtype || elements != elements_) {
    communicator_->poison(
        {Cause::disagree,
         str_cat("ranks disagree: rank ", rank_, " called ", named().text(), ", rank ", other(),
                 " called the matching recv with ", elements, " elements of ", dtype,
                 "; what is sent and what is received must have one dtype and "
                 "equally many elements")});
    return false;
  }
  if (!communicator_->take_outbox(this)) return false;
  enter(State::agreed);
  return true;
}

bool Transfer::push() {
  const bool begins = state() != State::agreed;
  if (begins && !begin_sending()) return false;
  const uint64_t taken = count_in(pair().taken.load(memory_order_acquire), call_.sequence);
  const uint64_t before = moved_, limit = std::min(chunks_, taken + area().window_chunks());
  for (; moved_ < limit; ++moved_)
    bytes_.read(first(moved_), count(moved_), area().outbox(rank_, moved_));
  if (begins || moved_ != before)
    pair().sent.store(counted(call_.sequence, moved_), memory_order_release);
  if (taken == chunks_) {
    communicator_->leave_outbox();
    complete();
  }
  return begins || moved_ != before || over();
}

bool Transfer::pull() {
  const bool begins = state() == State::queued;
  if (begins) {
    pair().wanted.store(static_cast<uint64_t>(elements_) << 8 | static_cast<uint64_t>(call_.dtype),
                        memory_order_relaxed);
    pair().announced.store(call_.sequence, memory_order_release);
    enter(State::published);
  }
  const uint64_t sent = pair().sent.load(memory_order_acquire);
  if (!is_of(sent, call_.sequence)) return begins;
  const uint64_t before = moved_, limit = count_in(sent, call_.sequence);
  for (; moved_ < limit; ++moved_)
    bytes_.write(first(moved_), count(moved_), area().outbox(other(), moved_));
  if (moved_ != before) pair().taken.store(counted(call_.sequence, moved_), memory_order_release);
  if (moved_ == chunks_) complete();
  return begins || moved_ != before || over();
}

bool Transfer::needs(int rank) const {
  if (rank != other()) return false;
  if (sends())
    return count_in(pair().taken.load(memory_order_acquire), call_.sequence) < chunks_ ||
           state() != State::agreed;
  const uint64_t sent = pair().sent.load(memory_order_acquire);
  return !is_of(sent, call_.sequence) || count_in(sent, call_.sequence) < chunks_;
}

std::vector<int> Transfer::not_called() const {
  const auto& theirs = sends() ? pair().receives_called : pair().sends_called;
  return theirs.load(memory_order_acquire) < call_.sequence ? std::vector<int>{other()}
                                                            : std::vector<int>{};
}

std::vector<int> Transfer::missing() const {
  const bool called = sends() ? pair().announced.load(memory_order_acquire) >= call_.sequence
                              : is_of(pair().sent.load(memory_order_acquire), call_.sequence);
  return called ? std::vector<int>{} : std::vector<int>{other()};
}

}  // namespace lockstep::dist

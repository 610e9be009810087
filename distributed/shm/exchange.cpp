// Exchange's steps. The order of memory operations is what makes them safe: data, then the count
// that announces it (release); the count (acquire), then the data.
#include <lockstep/distributed/shm/exchange.h>

#include <algorithm>

#include <lockstep/distributed/shm/communicator.h>
#include <lockstep/distributed/shm/reduce.h>

namespace lockstep::dist {

using std::memory_order_acq_rel;
using std::memory_order_acquire;
using std::memory_order_release;

Exchange::Exchange(std::shared_ptr<Communicator> communicator, const Call& call, Collective what)
    : Operation(std::move(communicator), call, std::move(what)), pattern_(Pattern::of(call)) {
  if (!is_among(pattern_.offers, rank_, call_.root)) return;
  const int slots = pattern_.parts ? size_ : 1;
  sources_.reserve(static_cast<size_t>(slots));
  for (int k = 0; k < slots; ++k) {
    const int to = pattern_.parts ? owner(rank_, k) : 0;
    const Tensor& t = what_.inputs[static_cast<size_t>(to)];
    const uint64_t end = chunks_ + chunks_of(t.numel(), chunk_elements_);
    sources_.push_back({StridedBytes(t), t.numel(), to, chunks_, end});
    chunks_ = end;
  }
}

bool Exchange::advance() {
  bool moved = false;
  if (state() == State::queued) {
    if (!lane_is_free()) return false;
    publish();
    moved = true;
  }
  moved |= offer();
  if (state() == State::published) {
    if (!all_arrived()) return moved;
    compare();
    if (state() == State::published) return moved;
    moved = true;
  }
  bool again = chunks_ > 0 || !targets_.empty();
  while (again) {
    again = pattern_.combines ? combine() : take_streams();
    again |= take_combined();
    again |= offer();
    moved |= again;
  }
  if (finished()) {
    mark(rank_).left.store(call_.sequence, memory_order_release);
    complete();
  }
  return moved || over();
}

// A lane is used again only when every rank has left it; until then the operation waits its turn
// here.
bool Exchange::lane_is_free() const {
  if (call_.sequence <= kLanes) return true;
  for (int r = 0; r < size_; ++r)
    if (mark(r).left.load(memory_order_acquire) < call_.sequence - kLanes) return false;
  return true;
}

void Exchange::publish() {
  if (call_.is(CollectiveKind::all_to_all))
    for (size_t r = 0; r < static_cast<size_t>(size_); ++r) {
      area().gives(call_.sequence, rank_)[r] = what_.inputs[r].numel();
      area().wants(call_.sequence, rank_)[r] = what_.outputs[r].numel();
    }
  area().call(call_.sequence, rank_) = call_;
  mark(rank_).arrived.store(call_.sequence, memory_order_release);
  enter(State::published);
}

bool Exchange::all_arrived() const {
  for (int r = 0; r < size_; ++r)
    if (mark(r).arrived.load(memory_order_acquire) < call_.sequence) return false;
  return true;
}

void Exchange::compare() {
  places_.assign(static_cast<size_t>(size_), nullptr);
  for (int r = 0; r < size_; ++r) {
    const Call& theirs = area().call(call_.sequence, r);
    if (!call_.agrees_with(theirs)) {
      const bool lower = rank_ < r;
      communicator_->poison(
          {Cause::disagree,
           str_cat("ranks disagree: rank ", lower ? rank_ : r, " called ",
                   (lower ? call_ : theirs).text(), ", rank ", lower ? r : rank_, " called ",
                   (lower ? theirs : call_).text(),
                   "; all ranks must call the same collectives in the same order")});
      return;
    }
    if (theirs.allocation)
      places_[static_cast<size_t>(r)] =
          communicator_->allocations().at({theirs.allocation, theirs.offset}, r);
    else
      any_window_ = true;
  }
  if (call_.is(CollectiveKind::all_to_all) && !sizes_agree()) return;
  const bool is_there = pattern_.combines && direct();  // the result will be
  if (!is_there && is_among(pattern_.takes, rank_, call_.root)) plan_taking();
  enter(State::agreed);
}

// Every rank looks at every pair, so that all find the same.
bool Exchange::sizes_agree() const {
  for (int from = 0; from < size_; ++from)
    for (int to = 0; to < size_; ++to) {
      const int64_t gives = area().gives(call_.sequence, from)[to];
      const int64_t wants = area().wants(call_.sequence, to)[from];
      if (gives == wants) continue;
      communicator_->poison({Cause::disagree, str_cat("ranks disagree: in ", call_.text(), " rank ",
                                                      from, " sends ", gives, " elements to rank ",
                                                      to, ", which expects ", wants, " from it")});
      return false;
    }
  return true;
}

void Exchange::plan_taking() {
  const auto add = [&](size_t output, int from, uint64_t begin) {
    const Tensor& t = what_.outputs[output];
    Part p{StridedBytes(t), t.numel(), from, begin, begin + chunks_of(t.numel(), chunk_elements_)};
    p.in_place =
        from == rank_ && direct() && p.bytes.dense() && p.bytes.data() == sources_[0].bytes.data();
    targets_.push_back(p);
  };
  if (pattern_.combines || pattern_.offers == Who::root) {
    const bool own_part = pattern_.combines && pattern_.parts;
    add(0, call_.root,
        own_part ? sources_[static_cast<size_t>(rank_)].begin : first_chunk_from(call_.root));
    return;
  }
  targets_.reserve(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) add(static_cast<size_t>(r), r, first_chunk_from(r));
}

// Where in the stream of `source` this rank's part begins.
uint64_t Exchange::first_chunk_from(int source) const {
  if (!pattern_.parts) return 0;
  const int slots_before = (rank_ - source + size_) % size_;
  if (!call_.is(CollectiveKind::all_to_all))
    return static_cast<uint64_t>(slots_before) * chunks_of(call_.numel(), chunk_elements_);
  uint64_t begin = 0;
  for (int k = 0; k < slots_before; ++k)
    begin += chunks_of(area().gives(call_.sequence, source)[owner(source, k)], chunk_elements_);
  return begin;
}

// How many chunks of this rank's stream nobody needs any more, from its beginning.
uint64_t Exchange::released() const {
  uint64_t least = chunks_;
  const auto look = [&](int taker, uint64_t begin, uint64_t end) {
    const uint64_t n = count_in(
        area().taken(call_.sequence, taker, rank_).load(memory_order_acquire), call_.sequence);
    if (begin + n < end) least = std::min(least, begin + n);
  };
  if (pattern_.parts)
    for (const Part& p : sources_) look(p.rank, p.begin, p.end);
  else
    for (int r = 0; r < size_; ++r)
      if (is_among(pattern_.takes, r, call_.root)) look(r, 0, chunks_);
  return least;
}

std::byte* Exchange::place(int rank, uint64_t chunk) const {
  std::byte* whole = places_[static_cast<size_t>(rank)];
  return whole ? whole + chunk * kChunkBytes : area().window(call_.sequence, rank, chunk);
}

bool Exchange::offer() {
  if (offered_ == chunks_) return false;
  uint64_t limit = chunks_;
  if (!direct()) {
    limit = std::min(limit, (pattern_.combines ? taken_ : released()) + area().window_chunks());
    for (uint64_t c = offered_; c < limit; ++c) {
      while (c >= sources_[slot_].end) ++slot_;
      const Part& from = sources_[slot_];
      from.bytes.read(first(from, c), count(from, c), area().window(call_.sequence, rank_, c));
    }
  }
  if (limit == offered_) return false;
  offered_ = limit;
  mark(rank_).offered.store(counted(call_.sequence, offered_), memory_order_release);
  return true;
}

bool Exchange::combine() {
  Lane& lane = area().lane(call_.sequence);
  bool moved = false;
  for (;;) {
    uint64_t limit = chunks_;
    for (int r = 0; r < size_; ++r) limit = std::min(limit, offered_by(r));
    uint64_t word = lane.claimed.load(memory_order_acquire);
    const uint64_t c = count_in(word, call_.sequence);
    if (word & kPoison || c >= limit) return moved;
    if (!lane.claimed.compare_exchange_weak(word, counted(call_.sequence, c + 1),
                                            memory_order_acq_rel))
      continue;
    buffers_.resize(static_cast<size_t>(size_));
    for (int r = 0; r < size_; ++r) buffers_[static_cast<size_t>(r)] = place(r, c);
    // Of parts and of a root's alone, one rank needs the result; the others' tensors stay as they
    // are.
    const Part& part = sources_[pattern_.parts ? c / sources_[0].end : 0];
    const int one = pattern_.parts ? part.rank : call_.root;
    const bool all = !pattern_.parts && pattern_.takes == Who::all;
    reduce_into(buffers_, all ? buffers_ : std::span(&buffers_[static_cast<size_t>(one)], 1),
                static_cast<size_t>(count(part, c)), call_.dtype, call_.reduce);
    if (any_window_)
      lane.finished[c % area().window_chunks()].store(counted(call_.sequence, c + 1),
                                                      memory_order_release);
    word = lane.done.load(std::memory_order_relaxed);
    while (!lane.done.compare_exchange_weak(
        word, counted(call_.sequence, count_in(word, call_.sequence) + 1), memory_order_acq_rel)) {
    }
    moved = true;
  }
}

bool Exchange::take_combined() {
  if (!pattern_.combines || direct()) return false;
  const Lane& lane = area().lane(call_.sequence);
  const uint64_t window = area().window_chunks(), before = taken_;
  while (taken_ < offered_ && lane.finished[taken_ % window].load(memory_order_acquire) ==
                                  counted(call_.sequence, taken_ + 1)) {
    if (!targets_.empty() && taken_ >= targets_[0].begin && taken_ < targets_[0].end) {
      const Part& to = targets_[0];
      to.bytes.write(first(to, taken_), count(to, taken_), place(rank_, taken_));
    }
    ++taken_;
  }
  return taken_ != before;
}

bool Exchange::take_streams() {
  bool moved = false;
  for (Part& p : targets_) {
    const uint64_t limit = std::min(p.end, offered_by(p.rank));
    if (p.begin + p.done >= limit) continue;
    for (uint64_t c = p.begin + p.done; c < limit && !p.in_place; ++c)
      p.bytes.write(first(p, c), count(p, c), place(p.rank, c));
    p.done = limit - p.begin;
    area()
        .taken(call_.sequence, rank_, p.rank)
        .store(counted(call_.sequence, p.done), memory_order_release);
    moved = true;
  }
  return moved;
}

bool Exchange::finished() const {
  if (state() != State::agreed) return false;
  if (pattern_.combines) {
    if (!direct() || chunks_ == 0) return taken_ == chunks_;
    return count_in(area().lane(call_.sequence).done.load(memory_order_acquire), call_.sequence) ==
           chunks_;
  }
  for (const Part& p : targets_)
    if (p.done < p.end - p.begin) return false;
  return (direct() ? released() : offered_) == chunks_;
}

bool Exchange::needs(int rank) const {
  return mark(rank).left.load(memory_order_acquire) < call_.sequence;
}

std::vector<int> Exchange::missing() const {
  std::vector<int> late;
  for (int r = 0; r < size_; ++r) {
    const Mark& theirs = mark(r);
    const bool waits_for_lane = state() == State::queued;
    if (waits_for_lane ? theirs.left.load(memory_order_acquire) + kLanes < call_.sequence
                       : theirs.arrived.load(memory_order_acquire) < call_.sequence)
      late.push_back(r);
  }
  return late;
}

std::vector<int> Exchange::not_called() const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (area().called(r).load(memory_order_acquire) < call_.sequence) ranks.push_back(r);
  return ranks;
}

// Of the others that are still in it, those that have moved the fewest chunks.
std::vector<int> Exchange::lagging() const {
  std::vector<int> slowest;
  uint64_t least = ~uint64_t{0};
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !needs(r)) continue;
    uint64_t moved = offered_by(r);
    for (int from = 0; from < size_ && !pattern_.combines; ++from)
      moved += count_in(area().taken(call_.sequence, r, from).load(memory_order_acquire),
                        call_.sequence);
    if (moved < least) slowest.clear();
    if (moved <= least) slowest.push_back(r);
    least = std::min(least, moved);
  }
  return slowest;
}

}  // namespace lockstep::dist

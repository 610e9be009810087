// Communicator: the list of operations under way and its ends, good and bad.
#include <lockstep/distributed/communicator.h>

#include <algorithm>
#include <cstring>

namespace lockstep::dist {

Communicator::Communicator(std::shared_ptr<Engine> engine, SharedArea area, uint64_t id,
                           Milliseconds timeout)
    : engine_(std::move(engine)), area_(std::move(area)), id_(id), timeout_(timeout) {
  std::lock_guard lock(engine_->mutex());
  engine_->enlist(this);
}

Communicator::~Communicator() {
  std::lock_guard lock(engine_->mutex());
  engine_->dismiss(this);
}

void Communicator::refuse(std::string_view what) const {
  LOCKSTEP_CHECK(!destroyed_, DistError, what, ": the group was destroyed on this rank");
  lockstep::fail<DistError>(what, ": ", area_.poison_text(),
                            "; last completed: ", last_completed_.text());
}

WorkPtr Communicator::issue(Call call, std::vector<Tensor> tensors, const Tensor& source,
                            const std::vector<Tensor>& targets, const CollectiveOptions& options) {
  std::shared_ptr<Operation> op;
  {
    std::lock_guard lock(engine_->mutex());
    call.sequence = ++sequence_;
    if (!usable()) refuse(NamedCall{call, options.label}.text());
    allocations_.purge(size());
    StridedBytes from;
    if (source.defined()) {
      from = StridedBytes(source);
      const size_t bytes = static_cast<size_t>(source.numel()) * size_of(source.dtype());
      if (from.dense()) {
        const Allocations::Place place = allocations_.find(from.data(), bytes, rank());
        call.allocation = place.id;
        call.offset = place.offset;
      }
    }
    op = std::make_shared<Operation>(shared_from_this(), call, std::move(tensors), from,
                                     targets,
                                     options.timeout.count() > 0 ? options.timeout : timeout_,
                                     options.label);
    const size_t lane = call.sequence % kLanes;
    op->set_bases(bases_[lane], reduce_bases_[lane]);
    bases_[lane] += op->chunks();
    if (call.kind == CallKind::all_reduce) reduce_bases_[lane] += op->chunks();
    operations_.push_back(op);
  }
  engine_->progress();
  return op;
}

bool Communicator::advance(std::vector<std::shared_ptr<Operation>>& finished) {
  if (operations_.empty()) return false;
  bool moved = false;
  for (const auto& op : operations_) moved |= op->advance();
  if (moved) engine_->peers().raise_others();
  // What could complete has completed: only now does the poison count.
  if (area_.poisoned())
    for (const auto& op : operations_)
      if (!op->over())
        op->fail(str_cat(op->named().text(), ": ", area_.poison_text(),
                         "; last completed: ", last_completed_.text()));
  std::erase_if(operations_, [&](const std::shared_ptr<Operation>& op) {
    if (!op->over()) return false;
    if (!op->failed()) last_completed_ = op->named();
    finished.push_back(op);
    return true;
  });
  return moved;
}

std::string Communicator::absence(int rank) const {
  if (rank == this->rank()) return {};
  if (area_.gone(rank).load(std::memory_order_acquire)) return str_cat("rank ", rank, " has left");
  return engine_->peers().lost(rank);
}

void Communicator::inspect(Clock::time_point now) {
  for (const auto& op : operations_) {
    for (int r = 0; r < size(); ++r) {
      if (!op->needs(r)) continue;
      const std::string why = absence(r);
      // Asked again: a rank that completed the operation, and then left or died, is not needed any
      // more.
      if (!why.empty() && op->needs(r)) return poison(why);
    }
    if (now >= op->deadline()) return poison(op->deadline_text());
  }
}

Clock::time_point Communicator::earliest_deadline() const {
  Clock::time_point earliest = Clock::time_point::max();
  for (const auto& op : operations_) earliest = std::min(earliest, op->deadline());
  return earliest;
}

void Communicator::poison(const std::string& text) {
  area_.poison(rank(), text);
  engine_->peers().raise_others();
}

void Communicator::abort(const std::string& text) {
  poison(str_cat("aborted by rank ", rank(), ": ", text));
  engine_->progress();
}

void Communicator::destroy() noexcept {
  if (destroyed_ || !engine_->peers().first()->is_here()) return;
  try {
    engine_->wait([this] {
      std::lock_guard lock(engine_->mutex());
      return operations_.empty();
    });
  } catch (...) {
    // Nothing is left to tell it to: an operation's own error stays in its Work.
  }
  destroyed_ = true;
  area_.gone(rank()).store(1, std::memory_order_release);
  engine_->peers().raise_others();
}

std::shared_ptr<Segment> Communicator::share(size_t bytes, std::string_view what) {
  std::shared_ptr<Segment> segment;
  std::exception_ptr mine;
  try {
    segment = engine_->peers().share(id_ ^ (++shares_ << 48), bytes);
  } catch (const Error&) {
    mine = std::current_exception();
  }
  // All ranks have it, or none: agree before anybody uses it.
  int32_t have = segment ? 1 : 0;
  const Tensor flag = from_blob(&have, {1}, {.dtype = DType::i32});
  issue({.kind = CallKind::all_reduce,
         .reduce = ReduceOp::min,
         .dtype = DType::i32,
         .dims = 1,
         .shape = {1}},
        {flag}, flag, {flag}, {.label = std::string(what)})
      ->wait();
  if (mine) std::rethrow_exception(mine);
  LOCKSTEP_CHECK(have, OutOfMemory, what, ": another rank could not get the ", bytes,
                 " bytes of shared memory");
  return segment;
}

std::shared_ptr<Communicator> Communicator::child() {
  issue({.kind = CallKind::child}, {}, {}, {}, {})->wait();
  const uint64_t id =
      (id_ + ++children_) * 0x9E3779B97F4A7C15u;  // the same on all ranks, and its own
  return std::make_shared<Communicator>(
      engine_, SharedArea(share(SharedArea::bytes_for(size()), "child"), 0, size()), id, timeout_);
}

Ref<Storage> Communicator::allocate(size_t bytes) {
  issue({.kind = CallKind::allocate, .dims = 1, .shape = {static_cast<int64_t>(bytes)}}, {}, {}, {},
        {})
      ->wait();
  std::shared_ptr<Segment> segment = share(Allocations::segment_bytes(bytes, size()), "allocate");
  std::lock_guard lock(engine_->mutex());
  return allocations_.add(std::move(segment), bytes, rank(), size());
}

void Communicator::post(uint64_t epoch, std::span<const std::byte> record) {
  LOCKSTEP_CHECK(record.size() <= kRecordBytes, ValueError, "post: a record has at most ",
                 kRecordBytes, " bytes, this one has ", record.size());
  LOCKSTEP_CHECK(posted_ == 0 || (epoch == posted_ && collected_ == posted_), ValueError,
                 "post: epochs grow by one, and each is collected before the next is posted; got ",
                 epoch, " after ", posted_ - 1);
  if (!usable()) refuse("post");
  Record& mine = area_.record(epoch, rank());
  mine.bytes = record.size();
  if (!record.empty()) std::memcpy(mine.data, record.data(), record.size());
  mine.epoch.store(epoch + 1, std::memory_order_release);
  posted_ = epoch + 1;
  engine_->peers().raise_others();
}

std::vector<std::vector<std::byte>> Communicator::collect(uint64_t epoch) {
  LOCKSTEP_CHECK(posted_ == epoch + 1, ValueError, "collect: epoch ", epoch,
                 " was not posted here before");
  const auto missing = [&] {
    for (int r = 0; r < size(); ++r)
      if (area_.record(epoch, r).epoch.load(std::memory_order_acquire) != epoch + 1) return r;
    return -1;
  };
  const Clock::time_point deadline = Clock::now() + timeout_;
  engine_->wait([&] { return missing() < 0; },
                [&] {
                  for (int r = 0; r < size(); ++r) {
                    const std::string why = absence(r);
                    if (!why.empty() &&
                        area_.record(epoch, r).epoch.load(std::memory_order_acquire) != epoch + 1)
                      poison(why);
                  }
                  const int late = missing();
                  if (late >= 0 && Clock::now() >= deadline)
                    poison(str_cat("rank ", late, " did not post its record of epoch ", epoch,
                                   " within ", timeout_.count(), " ms"));
                  if (late >= 0 && !usable()) refuse(str_cat("collect of epoch ", epoch));
                });
  std::vector<std::vector<std::byte>> records;
  for (int r = 0; r < size(); ++r) {
    const Record& theirs = area_.record(epoch, r);
    records.emplace_back(theirs.data, theirs.data + theirs.bytes);
  }
  collected_ = epoch + 1;
  return records;
}

}  // namespace lockstep::dist

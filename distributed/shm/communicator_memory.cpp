// Communicator: what needs new memory that several ranks see: groups and allocations.
#include <algorithm>

#include <lockstep/distributed/shm/communicator.h>

namespace lockstep::dist {

namespace {
// Another number for every pair, the same on all ranks.
uint64_t mixed(uint64_t id, uint64_t count) {
  uint64_t x = id + count * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

std::string listed(const int64_t* ranks, int64_t count, int64_t known) {
  std::string text = "{";
  for (int64_t i = 0; i < std::min(count, known); ++i) text += str_cat(i ? ", " : "", ranks[i]);
  return text + (count > known ? ", ...}" : "}");
}
}  // namespace

// New memory for those peers, null on the others; or an error on all ranks of this communicator.
std::shared_ptr<Segment> Communicator::share(const std::vector<int>& peers, size_t bytes,
                                             std::string_view what) {
  const uint64_t tag = mixed(id_, ++shares_ << 32);
  std::shared_ptr<Segment> segment;
  std::exception_ptr mine;
  int32_t good = 1;
  if (std::find(peers.begin(), peers.end(), engine_->peers().rank()) != peers.end()) try {
      segment = engine_->peers().share(peers, tag, bytes, deadline_after(timeout_));
    } catch (const Error&) {
      mine = std::current_exception();
      good = 0;
    }
  // All ranks have it, or none: agree before anybody uses it.
  const Tensor flag = from_blob(&good, {1}, {.dtype = DType::i32});
  start({.kind = CollectiveKind::all_reduce,
         .reduce = ReduceOp::min,
         .inputs = {flag},
         .outputs = {flag},
         .options = {.label = std::string(what)}})
      ->wait();
  if (mine) std::rethrow_exception(mine);
  LOCKSTEP_CHECK(good, OutOfMemory, what, ": another rank could not get the ", bytes,
                 " bytes of shared memory");
  return segment;
}

std::shared_ptr<Communicator> Communicator::form(const std::vector<int>& ranks,
                                                 std::string_view what, std::string name) {
  std::vector<int> peers;
  for (const int r : ranks) peers.push_back(members_[static_cast<size_t>(r)]);
  const uint64_t id = mixed(id_, ++children_);
  const int size = static_cast<int>(peers.size());
  auto segment = share(peers, SharedArea::bytes_for(std::max(size, 1)), what);
  if (!segment) return nullptr;
  return std::make_shared<Communicator>(engine_, SharedArea(std::move(segment), 0, size),
                                        std::move(peers), id, std::move(name), timeout_);
}

std::shared_ptr<Communicator> Communicator::child() {
  issue({.kind = CallKind::child}, {})->wait();
  std::vector<int> all;
  for (int r = 0; r < size(); ++r) all.push_back(r);
  return form(all, "child", str_cat("child ", children_ + 1, " of ", name_));
}

std::shared_ptr<Communicator> Communicator::new_group(const std::vector<int>& ranks) {
  agree_on(ranks);
  std::string name = "the group of ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    name += str_cat(i ? ", " : "", members_[static_cast<size_t>(ranks[i])]);
  return form(ranks, "new_group", std::move(name));
}

// Also lists that make no sense are compared, so that no rank waits for one that threw.
void Communicator::agree_on(const std::vector<int>& ranks) {
  const int64_t most = size();
  uint64_t hash = ranks.size();
  for (const int r : ranks) hash = mixed(hash, static_cast<uint64_t>(r));
  const Tensor mine = zeros({most + 2}, {.dtype = DType::i64});  // the count, a hash, the ranks
  mine.data<int64_t>()[0] = static_cast<int64_t>(ranks.size());
  mine.data<int64_t>()[1] = static_cast<int64_t>(hash);
  std::copy_n(ranks.begin(), std::min<size_t>(ranks.size(), members_.size()),
              mine.data<int64_t>() + 2);
  Collective what{.inputs = {mine}};
  for (int r = 0; r < size(); ++r) what.outputs.push_back(empty_like(mine));
  const std::vector<Tensor> lists = what.outputs;
  Call call{.kind = CallKind::new_group, .dtype = DType::i64, .dims = 1, .shape = {most + 2}};
  issue(call, std::move(what))->wait();
  const auto* first = lists[0].data<int64_t>();
  for (int r = 1; r < size(); ++r) {
    const auto* theirs = lists[static_cast<size_t>(r)].data<int64_t>();
    LOCKSTEP_CHECK(std::equal(first, first + most + 2, theirs), DistError,
                   "new_group: ranks disagree: rank 0 listed ", listed(first + 2, *first, most),
                   ", rank ", r, " listed ", listed(theirs + 2, *theirs, most),
                   "; all ranks must pass the same ranks in the same order");
  }
  std::vector<bool> seen(members_.size());
  for (const int r : ranks) {
    LOCKSTEP_CHECK(r >= 0 && r < size(), ValueError,
                   "new_group: the ranks must be those of this group, 0 .. ", size() - 1, ", got ",
                   r);
    LOCKSTEP_CHECK(!seen[static_cast<size_t>(r)], ValueError, "new_group: rank ", r,
                   " is listed twice");
    seen[static_cast<size_t>(r)] = true;
  }
}

Ref<Storage> Communicator::allocate(size_t bytes) {
  issue({.kind = CallKind::allocate, .dims = 1, .shape = {static_cast<int64_t>(bytes)}}, {})
      ->wait();
  std::shared_ptr<Segment> segment =
      share(members_, Allocations::segment_bytes(bytes, size()), "allocate");
  std::lock_guard lock(engine_->mutex());
  return allocations_.add(std::move(segment), bytes, rank_, size());
}

}  // namespace lockstep::dist

// The local backend: ranks are threads, and a hub in plain memory takes the place of sockets.
#include <lockstep/distributed/local.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include <lockstep/distributed/limits.h>
#include <lockstep/distributed/shm/shared_group.h>
#include <lockstep/distributed/single_group.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

namespace lockstep::dist {

namespace {

// Where threads leave memory for each other, and word of their end.
struct Hub {
  std::mutex mutex;
  std::condition_variable shared;
  struct Share {
    std::shared_ptr<Segment> segment;
    std::string error;
    int takers;
  };
  std::map<uint64_t, Share> shares;  // by tag
  std::vector<std::string> ends;     // by rank: why it is gone; empty while it runs
  std::atomic<int> threads = 0;      // of the ranks, and the one that waits for them
  std::exception_ptr first_failure;  // one of a rank's own, if there is any
  bool is_a_peers = false;           // it only tells that another rank failed
};

class LocalPeers final : public Peers {
 public:
  LocalPeers(int rank, int size, std::shared_ptr<Segment> first, std::shared_ptr<Hub> hub)
      : Peers(rank, size, std::move(first)), hub_(std::move(hub)) {
    fill_slot(0);
  }

  std::string lost(int rank) override {
    std::lock_guard lock(hub_->mutex);
    return hub_->ends[static_cast<size_t>(rank)];
  }

  std::shared_ptr<Segment> share(const std::vector<int>& members, uint64_t tag, size_t bytes,
                                 Clock::time_point deadline) override {
    const auto first = static_cast<size_t>(members[0]);
    if (rank() == members[0]) {
      Hub::Share made{nullptr, {}, static_cast<int>(members.size()) - 1};
      try {
        made.segment = Segment::plain(bytes);
      } catch (const OutOfMemory& e) {
        made.error = e.what();
      }
      std::lock_guard lock(hub_->mutex);
      if (made.takers > 0) hub_->shares[tag] = made;
      hub_->shared.notify_all();
      return taken(made);
    }
    std::unique_lock lock(hub_->mutex);
    hub_->shared.wait_until(
        lock, deadline, [&] { return hub_->shares.contains(tag) || !hub_->ends[first].empty(); });
    const auto it = hub_->shares.find(tag);
    LOCKSTEP_CHECK(it != hub_->shares.end(), DistError, "share: rank ", first, " ",
                   hub_->ends[first].empty() ? "is late" : hub_->ends[first]);
    const Hub::Share mine = it->second;
    if (--it->second.takers == 0) hub_->shares.erase(it);
    return taken(mine);
  }

  int other_ranks_threads() const override { return hub_->threads - 1; }

  // The rank's thread is over; whoever waits for it must hear of it.
  void end(const std::string& why, std::exception_ptr failure, bool is_a_peers) {
    {
      std::lock_guard lock(hub_->mutex);
      hub_->ends[static_cast<size_t>(rank())] = why;
      if (failure && (!hub_->first_failure || (hub_->is_a_peers && !is_a_peers))) {
        hub_->first_failure = failure;
        hub_->is_a_peers = is_a_peers;
      }
      hub_->shared.notify_all();
    }
    wake_others();
  }

 private:
  static std::shared_ptr<Segment> taken(const Hub::Share& share) {
    LOCKSTEP_CHECK(share.segment, OutOfMemory, share.error);
    return share.segment;
  }

  std::shared_ptr<Hub> hub_;
};

// What happens in a rank's thread.
void run_rank(std::unique_ptr<LocalPeers> peers, const std::function<void(Group)>& f,
              const LocalOptions& options) {
  const Origin origin;
  const int rank = peers->rank();
  LocalPeers& mine = *peers;
  const auto group = std::make_shared<SharedGroup>("local", std::move(peers), options.timeout);
  std::string why = "has left";
  std::exception_ptr failure;
  bool is_a_peers = false;
  try {
    set_default_group(group, rank);
    f(default_group());
    set_default_group(nullptr, 0);
    group->destroy();
  } catch (const std::exception& e) {
    failure = std::current_exception();
    why = str_cat("failed: ", e.what());
    is_a_peers = dynamic_cast<const PeerError*>(&e) != nullptr;
  } catch (...) {
    failure = std::current_exception();
    why = "failed";
  }
  if (!origin.is_here()) {  // a forked child that has left f: it speaks for nobody
    if (failure) std::rethrow_exception(failure);
    return;
  }
  mine.end(why, failure, is_a_peers);
  set_default_group(nullptr, 0);
  if (failure) group->abort(str_cat("rank ", rank, " ", why));
}

}  // namespace

void run_local(int world_size, const std::function<void(Group)>& f, LocalOptions options) {
  LOCKSTEP_CHECK(world_size >= 1, ValueError, "run_local: needs at least one rank, got ",
                 world_size);
  auto hub = std::make_shared<Hub>();
  hub->ends.resize(static_cast<size_t>(world_size));
  hub->threads = world_size + 1;
  options.timeout = bounded(options.timeout);
  const auto first = Segment::plain(SharedGroup::bytes_for(world_size));
  std::vector<std::unique_ptr<LocalPeers>> peers;
  for (int r = 0; r < world_size; ++r)
    peers.push_back(std::make_unique<LocalPeers>(r, world_size, first, hub));

  const Generator generator = default_generator();
  const int threads_each = std::max(1, get_num_threads() / world_size);
  // No rank begins before all threads are there, and none begins when one is missing.
  std::promise<bool> all_there;
  const std::shared_future<bool> begin = all_there.get_future().share();
  std::vector<std::thread> threads;
  std::string missing;
  try {
    for (auto& mine : peers)
      threads.emplace_back([&, begin, mine = std::move(mine)]() mutable {
        if (!begin.get()) return;
        lockstep::detail::start_generator(generator);
        set_num_threads(threads_each);
        run_rank(std::move(mine), f, options);
        --hub->threads;
      });
  } catch (const std::system_error&) {
    missing = thread_limit_text(str_cat("the thread of rank ", threads.size(), " of ", world_size));
  }
  all_there.set_value(missing.empty());
  for (std::thread& t : threads) t.join();
  LOCKSTEP_CHECK(missing.empty(), DistError, "run_local: ", missing);
  if (hub->first_failure) std::rethrow_exception(hub->first_failure);
}

}  // namespace lockstep::dist

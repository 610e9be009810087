// The local backend: a hub in plain memory stands for what sockets do between processes.
#include <lockstep/distributed/local.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

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
  std::exception_ptr cause;          // what run_local rethrows
  bool cause_is_a_peer = true;       // and whether another rank's failure may be behind it
};

bool is_dist_error(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const DistError&) {
    return true;
  } catch (...) {
  }
  return false;
}

class LocalPeers final : public Peers {
 public:
  LocalPeers(int rank, int size, std::shared_ptr<Segment> first, std::shared_ptr<Hub> hub)
      : Peers(rank, size, std::move(first)), hub_(std::move(hub)) {
    sit_down(0);
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

  // The rank's thread is over; whoever waits for it must hear of it.
  void end(const std::string& why, std::exception_ptr failure) {
    {
      std::lock_guard lock(hub_->mutex);
      hub_->ends[static_cast<size_t>(rank())] = why;
      const bool is_peer = is_dist_error(failure);
      // A rank that fails takes others along, which may end before it.
      if (failure && (!hub_->cause || (hub_->cause_is_a_peer && !is_peer))) {
        hub_->cause = failure;
        hub_->cause_is_a_peer = is_peer;
      }
      hub_->shared.notify_all();
    }
    raise_others();
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
  const int rank = peers->rank();
  LocalPeers& mine = *peers;
  const auto group = std::make_shared<SharedGroup>("local", std::move(peers), options.timeout);
  std::string why = "has left";
  std::exception_ptr failure;
  try {
    set_default_group(group, rank);
    f(default_group());
    set_default_group(nullptr, 0);
    group->destroy();
  } catch (const std::exception& e) {
    failure = std::current_exception();
    why = str_cat("failed: ", e.what());
  } catch (...) {
    failure = std::current_exception();
    why = "failed";
  }
  mine.end(why, failure);
  set_default_group(nullptr, 0);
  if (failure) group->abort(str_cat("rank ", rank, " ", why));
}

}  // namespace

void run_local(int world_size, const std::function<void(Group)>& f, LocalOptions options) {
  LOCKSTEP_CHECK(world_size >= 1, ValueError, "run_local: needs at least one rank, got ",
                 world_size);
  auto hub = std::make_shared<Hub>();
  hub->ends.resize(static_cast<size_t>(world_size));
  const auto first = Segment::plain(SharedGroup::bytes_for(world_size));
  std::vector<std::unique_ptr<LocalPeers>> peers;
  for (int r = 0; r < world_size; ++r)
    peers.push_back(std::make_unique<LocalPeers>(r, world_size, first, hub));

  const Generator generator = default_generator();
  const int threads_each = std::max(1, get_num_threads() / world_size);
  std::vector<std::thread> threads;
  for (auto& mine : peers)
    threads.emplace_back([&, mine = std::move(mine)]() mutable {
      default_generator() = generator;
      set_num_threads(threads_each);
      run_rank(std::move(mine), f, options);
    });
  for (std::thread& t : threads) t.join();
  if (hub->cause) std::rethrow_exception(hub->cause);
}

}  // namespace lockstep::dist

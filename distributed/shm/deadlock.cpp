// Marks of blocked ranks, and the search for a cycle among them.
#include <lockstep/distributed/shm/deadlock.h>

#include <algorithm>

#include <lockstep/tensor/process.h>

namespace lockstep::dist {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;

namespace {

constexpr Milliseconds kLookEvery(150);    // ranks sleep for at most 200 ms at a time
constexpr Milliseconds kMarkedAfter(200);  // what is shorter costs nothing but a look at the clock
constexpr Milliseconds kSearchedAfter(450);
constexpr Milliseconds kDeclaredAfter(950);

}  // namespace

BlockedWait::BlockedWait(Peers& peers, std::function<Obstacle()> obstacle)
    : peers_(peers), obstacle_(std::move(obstacle)), next_look_(begin_ + kMarkedAfter) {}

BlockedWait::~BlockedWait() {
  BlockedMark& mine = mark(peers_.rank());
  if (stamp_ != 0 && mine.stamp.load(memory_order_relaxed) == stamp_)
    mine.stamp.store(0, memory_order_release);
}

// A wait inside another one (a callback's) has a mark of its own, so the outer one's is written
// anew.
void BlockedWait::publish(Clock::time_point now) {
  BlockedMark& mine = mark(peers_.rank());
  const Obstacle obstacle = obstacle_();
  const bool anew = stamp_ == 0 || mine.stamp.load(memory_order_relaxed) != stamp_;
  if (anew) {
    mine.stamp.store(0, memory_order_release);
    mine.call.write(obstacle.call);
  }
  uint64_t missing[kMostPeers / 64] = {};
  for (const int peer : obstacle.missing) missing[peer / 64] |= uint64_t{1} << (peer % 64);
  for (int word = 0; word < kMostPeers / 64; ++word)
    mine.missing[word].store(missing[word], memory_order_relaxed);
  mine.looks.fetch_add(1, memory_order_release);
  if (!anew) return;
  // Another number than any wait of this rank had before, small enough to be multiplied by
  // kMostPeers (see condemned).
  stamp_ = static_cast<uint64_t>(now.time_since_epoch().count()) % (UINT64_MAX / kMostPeers);
  mine.stamp.store(stamp_, memory_order_release);
}

// The shortest way from this rank over missing ranks, all blocked, back to this rank.
std::vector<BlockedWait::Seen> BlockedWait::find_cycle() const {
  const int me = peers_.rank(), size = peers_.size();
  std::vector<int> from(static_cast<size_t>(size), -1), reached{me};
  std::vector<Seen> seen(static_cast<size_t>(size));
  for (size_t next = 0; next < reached.size(); ++next) {
    const int r = reached[next];
    const BlockedMark& theirs = mark(r);
    seen[static_cast<size_t>(r)] = {r, theirs.stamp.load(memory_order_acquire),
                                    theirs.looks.load(memory_order_acquire)};
    if (seen[static_cast<size_t>(r)].stamp == 0) continue;
    for (int m = 0; m < size; ++m) {
      if (!(theirs.missing[m / 64].load(memory_order_relaxed) >> (m % 64) & 1)) continue;
      if (m == me) {
        std::vector<Seen> cycle;
        for (int at = r; at != me; at = from[static_cast<size_t>(at)])
          cycle.push_back(seen[static_cast<size_t>(at)]);
        cycle.push_back(seen[static_cast<size_t>(me)]);
        std::reverse(cycle.begin(), cycle.end());
        return cycle;
      }
      if (from[static_cast<size_t>(m)] >= 0) continue;
      from[static_cast<size_t>(m)] = r;
      reached.push_back(m);
    }
  }
  return {};
}

// Whether the same waits still go on, each for want of the next rank's call.
bool BlockedWait::holds(const std::vector<Seen>& cycle) const {
  for (size_t i = 0; i < cycle.size(); ++i) {
    const int next = cycle[(i + 1) % cycle.size()].rank;
    const BlockedMark& theirs = mark(cycle[i].rank);
    const bool waits = theirs.missing[next / 64].load(memory_order_acquire) >> (next % 64) & 1;
    if (!waits || theirs.stamp.load(memory_order_acquire) != cycle[i].stamp) return false;
  }
  return true;
}

// Whether each of its ranks has determined anew whom it waits for since the cycle was seen. The first
// time that its count grows it may have determined them before, so it must have grown twice.
bool BlockedWait::was_renewed(const std::vector<Seen>& cycle) const {
  return std::all_of(cycle.begin(), cycle.end(), [&](const Seen& s) {
    return mark(s.rank).looks.load(memory_order_acquire) >= s.looks + 2;
  });
}

std::string BlockedWait::condemn(const std::vector<Seen>& cycle) const {
  const auto me = static_cast<uint64_t>(peers_.rank());
  std::string text = "deadlock: ";
  for (size_t i = 0; i < cycle.size(); ++i)
    text +=
        str_cat(i ? "; " : "", "rank ", cycle[i].rank, " waits in ",
                mark(cycle[i].rank).call.read(), " for rank ", cycle[(i + 1) % cycle.size()].rank);
  text += "; all ranks must enter the calls of all groups in the same order";
  mark(peers_.rank()).finding.write(text);
  for (const Seen& s : cycle) {
    mark(s.rank).condemned.store(s.stamp * kMostPeers + me, memory_order_release);
    wake(peers_.slot(s.rank).event);
  }
  return text;
}

bool BlockedWait::is_condemned(const Peers& peers, int rank) {
  const BlockedMark& theirs = peers.slot(rank).blocked;
  const uint64_t stamp = theirs.stamp.load(memory_order_acquire);
  return stamp != 0 && theirs.condemned.load(memory_order_acquire) / kMostPeers == stamp;
}

std::string BlockedWait::verdict() const {
  const uint64_t verdict = mark(peers_.rank()).condemned.load(memory_order_acquire);
  if (stamp_ == 0 || verdict / kMostPeers != stamp_) return {};
  return mark(static_cast<int>(verdict % kMostPeers)).finding.read();
}

std::string BlockedWait::look() {
  const Clock::time_point now = Clock::now();
  if (now < next_look_ || peers_.size() > kMostPeers ||
      foreign_threads() > peers_.other_ranks_threads())
    return {};
  next_look_ = now + kLookEvery;
  publish(now);
  if (now < begin_ + kSearchedAfter) return {};
  if (cycle_.empty() || !holds(cycle_)) {
    cycle_ = find_cycle();
    return {};
  }
  if (now < begin_ + kDeclaredAfter || !was_renewed(cycle_)) return {};
  return holds(cycle_) ? condemn(cycle_) : std::string();
}

}  // namespace lockstep::dist

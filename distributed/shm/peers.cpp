// Peers: what processes and threads have in common.
#include <lockstep/distributed/shm/peers.h>

#include <sched.h>

#include <bit>

namespace lockstep::dist {

void Peers::fill_slot(int64_t pid) const {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  RankSlot& mine = slot(rank_);
  mine.pid = pid;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) mine.cpus[i / 64] |= uint64_t{1} << (i % 64);
}

bool Peers::may_poll() const {
  int processors = 0;
  for (int word = 0; word < 16; ++word) {
    uint64_t any = 0;
    for (int r = 0; r < size_; ++r) any |= slot(r).cpus[word];
    processors += std::popcount(any);
  }
  return size_ <= processors;
}

}  // namespace lockstep::dist

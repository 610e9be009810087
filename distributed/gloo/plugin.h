// How liblockstep.so reaches the gloo plug-in, liblockstep_gloo.so: loaded from beside
// liblockstep.so on first use, so that the library itself does not need Gloo.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed/store.h>
#include <lockstep/distributed/store/wait_board.h>

namespace lockstep::dist {

/// A group over Gloo's TCP: which ranks of the store's job it has, and where they meet.
struct GlooSetup {
  std::shared_ptr<Store> store;
  std::string name;        // prefix of its keys; unique in the job
  std::vector<int> ranks;  // the job's ranks, by rank in the group
  int rank = 0;            // this process's, in the group
  std::string address;     // this host's, where Gloo listens
  Milliseconds timeout;    // of collectives
  Milliseconds join_timeout;
};

/// Connects the ranks; a collective call. Throws DistError when the plug-in cannot be loaded, with
/// the reason, or when the ranks do not meet.
std::shared_ptr<ProcessGroup> make_gloo_group(GlooSetup setup);

/// What a rank waits for that makes a group, or waits for others that do: that all members have
/// begun.
LOCKSTEP_API BlockedCall being_made(const GlooSetup& setup);

/// Blocks until a key is there, and throws PeerError when a member of the group is gone or the
/// group has ended before.
LOCKSTEP_API std::string wait_for_member(const GlooSetup& setup, const std::string& key,
                                         BlockedStoreWait& wait, Clock::time_point deadline);

/// new_group's other half: the ranks outside wait until those inside have connected, so that nobody
/// takes the store away from them; all hear of a failure. `make` makes the group.
template <class Make>
std::shared_ptr<ProcessGroup> make_together(const GlooSetup& setup, bool member, Make make) {
  const auto key = [&](size_t i) { return str_cat(setup.name, "/made/", i); };
  if (!member) {
    BlockedStoreWait wait(*setup.store, being_made(setup));
    const Clock::time_point deadline = deadline_after(setup.join_timeout);
    for (size_t i = 0; i < setup.ranks.size(); ++i) {
      const std::string error = wait_for_member(setup, key(i), wait, deadline);
      LOCKSTEP_CHECK(error.empty(), DistError, "new_group: ", error);
    }
    return nullptr;
  }
  const auto mine = static_cast<size_t>(setup.rank);
  try {
    std::shared_ptr<ProcessGroup> group = make(setup);
    setup.store->set(key(mine), "");
    return group;
  } catch (const Error& e) {
    setup.store->set(key(mine), e.what());
    throw;
  }
}

/// What the plug-in exports under kGlooFactory. It takes the setup and returns a group.
using GlooFactory = std::shared_ptr<ProcessGroup> (*)(GlooSetup&);
inline constexpr const char* kGlooFactory = "lockstep_gloo_group";
/// And under kGlooAbi a number that is gloo_abi() of the headers that it was compiled with.
using GlooAbi = uint64_t (*)();
inline constexpr const char* kGlooAbi = "lockstep_gloo_abi";
constexpr uint64_t gloo_abi() {
  uint64_t hash = 2;  // grows when a meaning changes and no size does
  for (const size_t size : {sizeof(GlooSetup), sizeof(Collective), sizeof(ProcessGroup),
                            sizeof(Work), sizeof(Tensor), sizeof(Shape), sizeof(DistError)})
    hash = (hash ^ size) * 0x100000001B3;
  return hash;
}

}  // namespace lockstep::dist

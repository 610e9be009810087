// Groups the ranks by host, and builds the two-level group.
#include <lockstep/distributed/hosts/meeting.h>

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include <lockstep/distributed/hosts/group.h>
#include <lockstep/distributed/log.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/distributed/shm/shared_group.h>
#include <lockstep/distributed/single_group.h>
#include <lockstep/distributed/store/socket.h>

namespace lockstep::dist {

namespace {

// Ranks of one id reach each other by abstract sockets: those belong to a network namespace of one
// running kernel.
std::string host_id(const Environment& env) {
  if (!env.host_id.empty()) return str_cat("LOCKSTEP_HOST_ID ", env.host_id);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char space[64] = {};
  [[maybe_unused]] const ssize_t n = readlink("/proc/self/ns/net", space, sizeof space - 1);
  return str_cat(boot, " ", space);
}

// What every rank says, by rank.
std::vector<std::string> exchange(Store& store, const std::string& what, const std::string& mine,
                                  Milliseconds timeout) {
  store.set(str_cat(what, "/", store.rank()), mine);
  const Clock::time_point deadline = deadline_after(timeout);
  std::vector<std::string> all;
  while (static_cast<int>(all.size()) < store.size()) {
    if (auto next = store.try_get(str_cat(what, "/", all.size()), Milliseconds(200))) {
      all.push_back(std::move(*next));
      continue;
    }
    for (const Store::Lost& lost : store.lost())
      fail<DistError>("init: ", lost.text(), " while the ranks met");
    LOCKSTEP_CHECK(Clock::now() < deadline, DistError, "init: rank ", all.size(),
                   " did not come so far (", what, ") within ", timeout.count(), " ms");
  }
  return all;
}

// Runs one step of the meeting; what fails on one rank fails on all.
void together(Store& store, const std::string& what, Milliseconds timeout,
              const std::function<void()>& step) {
  std::string error;
  try {
    step();
  } catch (const Error& e) {
    error = str_cat("rank ", store.rank(), ": ", e.what());
  }
  if (!error.empty()) store.expect_readers();
  for (const std::string& theirs : exchange(store, what, error, timeout))
    LOCKSTEP_CHECK(theirs.empty(), DistError, theirs);
}

// The address at which the other ranks reach this host: the one that reached rank 0. A rank beside
// rank 0 may have come by loopback; then rank 0 knows better.
std::string reachable_address(Store& store, const Environment& env, Milliseconds timeout) {
  if (env.one_host) return loopback_address(0).host();
  const std::string mine = store.local_address();
  const std::string first = exchange(store, "address", mine, timeout)[0];
  return resolve(mine, 0)[0].is_loopback() ? first : mine;
}

}  // namespace

std::shared_ptr<ProcessGroup> make_flat_group(const Environment& env, const InitOptions& options) {
  if (env.size == 1) return std::make_shared<SingleGroup>();
  const auto store = meet(env, options.join_timeout);
  GlooSetup setup{.store = store,
                  .name = "gloo",
                  .ranks = {},
                  .rank = env.rank,
                  .address = reachable_address(*store, env, options.join_timeout),
                  .timeout = options.timeout,
                  .join_timeout = options.join_timeout};
  for (int r = 0; r < env.size; ++r) setup.ranks.push_back(r);
  return make_gloo_group(std::move(setup));
}

std::shared_ptr<ProcessGroup> make_host_group(const Environment& env, const InitOptions& options) {
  if (env.size == 1) return std::make_shared<SingleGroup>();
  const Milliseconds timeout = options.join_timeout;
  HostParts parts;
  parts.store = meet(env, timeout);
  parts.timeout = options.timeout;
  parts.join_timeout = timeout;
  parts.address = reachable_address(*parts.store, env, timeout);
  const std::vector<std::string> ids = exchange(*parts.store, "host", host_id(env), timeout);
  std::vector<std::string> seen;
  for (int r = 0; r < env.size; ++r) {
    const std::string& id = ids[static_cast<size_t>(r)];
    const auto at = static_cast<size_t>(std::find(seen.begin(), seen.end(), id) - seen.begin());
    if (at == seen.size()) {
      seen.push_back(id);
      parts.hosts.emplace_back();
    }
    if (r == env.rank) {
      parts.host = static_cast<int>(at);
      parts.place = static_cast<int>(parts.hosts[at].size());
    }
    parts.hosts[at].push_back(r);
  }
  const std::vector<int>& here = parts.hosts[static_cast<size_t>(parts.host)];
  if (here.size() > 1)
    together(*parts.store, "within hosts", timeout, [&] {
      Environment inner = env;
      inner.rank = parts.place;
      inner.size = static_cast<int>(here.size());
      inner.run_id += str_cat("/host of rank ", here[0]);  // two groups may meet on one machine
      parts.gather = std::make_shared<SharedGroup>(
          "shm", join(inner, SharedGroup::bytes_for(inner.size), timeout), options.timeout);
      if (parts.hosts.size() > 1) parts.spread = parts.gather->child();
    });
  else
    together(*parts.store, "within hosts", timeout, [] {});
  log_info(str_cat("rank ", env.rank, " is on host ", parts.host, " of ", parts.hosts.size(),
                   ", with ", here.size(), " ranks"));
  if (parts.hosts.size() == 1) {
    parts.store->expect_readers(timeout);
    return parts.gather;
  }
  parts.leaders_name = "leaders";
  together(*parts.store, "between hosts", timeout, [&] {
    if (parts.place != 0) return;
    GlooSetup setup{.store = parts.store,
                    .name = parts.leaders_name,
                    .ranks = {},
                    .rank = parts.host,
                    .address = parts.address,
                    .timeout = options.timeout,
                    .join_timeout = timeout};
    for (const auto& host : parts.hosts) setup.ranks.push_back(host[0]);
    parts.leaders = make_gloo_group(std::move(setup));
  });
  return std::make_shared<HostGroup>(std::move(parts));
}

}  // namespace lockstep::dist

// The registry, with the backends of this library in it from the start.
#include <lockstep/distributed/registry.h>

#include <map>
#include <mutex>

#include <lockstep/distributed/hosts/meeting.h>
#include <lockstep/distributed/shm/rendezvous.h>
#include <lockstep/distributed/shm/shared_group.h>
#include <lockstep/distributed/single_group.h>

namespace lockstep::dist {

namespace {

std::shared_ptr<ProcessGroup> make_single(const Environment& env, const InitOptions&) {
  LOCKSTEP_CHECK(env.size == 1, DistError,
                 "init: backend single is a group of one rank, but there are ", env.size);
  return std::make_shared<SingleGroup>();
}

std::shared_ptr<ProcessGroup> make_shm(const Environment& env, const InitOptions& options) {
  LOCKSTEP_CHECK(env.one_host, DistError, "init: backend shm serves ranks of one host, but ",
                 env.launcher, " started ", env.local_size, " of ", env.size,
                 " ranks here; backend shm+gloo serves several hosts");
  return std::make_shared<SharedGroup>(
      "shm", join(env, SharedGroup::bytes_for(env.size), options.join_timeout), options.timeout);
}

std::shared_ptr<ProcessGroup> make_local(const Environment&, const InitOptions&) {
  fail<DistError>("init: backend local is entered through dist::run_local(world_size, f)");
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> factories{{"single", make_single},
                                                  {"shm", make_shm},
                                                  {"local", make_local},
                                                  {"gloo", make_flat_group},
                                                  {"shm+gloo", make_host_group}};
};
Registry& registry() {
  static Registry* r = new Registry;  // outlives every static that might use it
  return *r;
}

}  // namespace

void register_backend(const std::string& name, BackendFactory factory) {
  std::lock_guard lock(registry().mutex);
  registry().factories[name] = std::move(factory);
}

std::vector<std::string> backends() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry().factories) names.push_back(name);
  return names;
}

std::shared_ptr<ProcessGroup> make_group(const Environment& env, const InitOptions& options) {
  const std::string name = !options.backend.empty() ? options.backend
                           : env.size == 1          ? "single"
                           : env.one_host           ? "shm"
                                                    : "shm+gloo";
  BackendFactory factory;
  {
    std::lock_guard lock(registry().mutex);
    const auto it = registry().factories.find(name);
    if (it != registry().factories.end()) factory = it->second;
  }
  if (!factory) {
    std::string known;
    for (const std::string& b : backends()) known += str_cat(known.empty() ? "" : ", ", b);
    fail<DistError>("init: no backend is registered as \"", name, "\"; there are ", known);
  }
  return factory(env, options);
}

}  // namespace lockstep::dist

// Loads the plug-in once, and keeps it: groups of it live until the process ends.
#include <lockstep/distributed/gloo/plugin.h>

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>

#include <lockstep/distributed/peer_error.h>

namespace lockstep::dist {

namespace {

GlooFactory load() {
  Dl_info here{};
  LOCKSTEP_CHECK(dladdr(reinterpret_cast<void*>(&make_gloo_group), &here) && here.dli_fname,
                 DistError, "init: backend gloo: cannot find out where liblockstep.so is");
  const std::filesystem::path path =
      std::filesystem::path(here.dli_fname).parent_path() / "liblockstep_gloo.so";
  std::error_code ignored;
  LOCKSTEP_CHECK(std::filesystem::exists(path, ignored), DistError,
                 "init: backend gloo is not built: there is no ", path.string(),
                 "; install Gloo (Debian: libgloo-dev) and build again, with LOCKSTEP_GLOO=ON");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* error = library ? nullptr : dlerror();
  LOCKSTEP_CHECK(library, DistError, "init: backend gloo cannot be loaded: ", error ? error : "?");
  void* factory = dlsym(library, kGlooFactory);
  void* abi = dlsym(library, kGlooAbi);
  LOCKSTEP_CHECK(factory && abi && reinterpret_cast<GlooAbi>(abi)() == gloo_abi(), DistError,
                 "init: ", path.string(), " is of another version than liblockstep.so");
  return reinterpret_cast<GlooFactory>(factory);
}

}  // namespace

BlockedCall being_made(const GlooSetup& setup) {
  return {setup.name, 0, setup.ranks, str_cat("the making of group \"", setup.name, "\""),
          setup.name + "/end"};
}

std::string wait_for_member(const GlooSetup& setup, const std::string& key, BlockedStoreWait& wait,
                            Clock::time_point deadline) {
  for (;;) {
    if (auto value = setup.store->try_get(key, Milliseconds(200))) return std::move(*value);
    if (const auto end = setup.store->try_get(setup.name + "/end")) {
      const Ending why = Ending::unpacked(*end);
      throw PeerError(why.cause, "new_group: " + why.text);
    }
    for (const Store::Lost& lost : setup.store->lost())
      if (std::count(setup.ranks.begin(), setup.ranks.end(), lost.rank) > 0)
        throw PeerError(lost.left ? Cause::left : Cause::died,
                        str_cat("new_group: ", lost.text(), " while the group was made"));
    LOCKSTEP_CHECK(Clock::now() < deadline, DistError, "new_group: the ranks of group \"",
                   setup.name, "\" did not connect within ", setup.join_timeout.count(), " ms");
    wait.look();  // what it finds is in the store
  }
}

std::shared_ptr<ProcessGroup> make_gloo_group(GlooSetup setup) {
  static const GlooFactory factory = load();
  return factory(setup);
}

}  // namespace lockstep::dist

// Loads the plug-in once, and keeps it: groups of it live until the process ends.
#include <lockstep/distributed/gloo/plugin.h>

#include <dlfcn.h>

#include <filesystem>

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

std::shared_ptr<ProcessGroup> make_gloo_group(GlooSetup setup) {
  static const GlooFactory factory = load();
  return factory(setup);
}

}  // namespace lockstep::dist

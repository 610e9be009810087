// Run by onednn.cmake: prints the version of the oneDNN that was found. Exit code 0 where header and
// library are of one version, which has to hold, since they share structures.
#include <cstdio>

#include <oneapi/dnnl/dnnl.h>

int main() {
  const dnnl_version_t& library = *dnnl_version();
  const bool same = library.major == DNNL_VERSION_MAJOR && library.minor == DNNL_VERSION_MINOR;
  std::printf("%d.%d.%d", library.major, library.minor, library.patch);
  if (!same) std::printf(" and %d.%d", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR);
  return !same;
}

// The names of the ops that are loaded. Each op registers itself when the binary that applies it is
// loaded, so no list can forget one.
#include <mutex>
#include <set>

#include <lockstep/tensor/op.h>

namespace lockstep {
namespace {

struct OpNames {
  std::mutex mutex;
  std::set<std::string> names;
};
OpNames& registry() {  // made by the first op, before main
  static OpNames r;
  return r;
}

}  // namespace

std::vector<std::string> op_names() {
  const std::lock_guard lock(registry().mutex);
  return {registry().names.begin(), registry().names.end()};
}

bool detail::register_op(const char* name) {
  const std::lock_guard lock(registry().mutex);
  registry().names.insert(name);
  return true;
}

}  // namespace lockstep

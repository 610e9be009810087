// The list of the ops that are loaded. Each op registers itself when the binary that applies it is
// loaded, so no list can forget one.
#include <lockstep/tensor/op_info.h>

#include <algorithm>
#include <mutex>

namespace lockstep {
namespace {

struct Ops {
  std::mutex mutex;
  std::vector<OpInfo> list;
};
Ops& registry() {  // made by the first op, before main
  static Ops r;
  return r;
}

}  // namespace

std::vector<OpInfo> op_infos() {
  const std::lock_guard lock(registry().mutex);
  std::vector<OpInfo> ops = registry().list;
  std::stable_sort(ops.begin(), ops.end(), [](const OpInfo& a, const OpInfo& b) {
    return std::string_view(a.name) < std::string_view(b.name);
  });
  return ops;
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const OpInfo& op : op_infos())
    if (names.empty() || names.back() != op.name) names.emplace_back(op.name);
  return names;
}

bool detail::register_op(const OpInfo& info) {
  const std::lock_guard lock(registry().mutex);
  registry().list.push_back(info);
  return true;
}

}  // namespace lockstep

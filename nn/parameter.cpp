#include <lockstep/nn/parameter.h>

#include <map>
#include <mutex>

#include <lockstep/nn/registry.h>

namespace lockstep::nn {

Parameter::Parameter(const Tensor& data, bool requires_grad)
    : Tensor(data.defined() ? data.detach() : data) {
  if (defined()) requires_grad_(requires_grad);
}

namespace detail {
namespace {

struct Registry {
  std::mutex lock;
  std::map<uintptr_t, Part> parts;
};
// Never destroyed: a module with static lifetime may outlive everything in this file.
Registry& registry() {
  static Registry& r = *new Registry;
  return r;
}

}  // namespace

void part_appears(const void* at, Part what) {
  const std::lock_guard guard(registry().lock);
  registry().parts[reinterpret_cast<uintptr_t>(at)] = what;
}
void part_disappears(const void* at) noexcept {
  const std::lock_guard guard(registry().lock);
  registry().parts.erase(reinterpret_cast<uintptr_t>(at));
}

std::vector<LivingPart> parts_between(uintptr_t begin, uintptr_t end) {
  const std::lock_guard guard(registry().lock);
  const auto& parts = registry().parts;
  std::vector<LivingPart> found;
  for (auto it = parts.lower_bound(begin); it != parts.end() && it->first < end; ++it)
    found.push_back({it->first, it->second});
  return found;
}

}  // namespace detail
}  // namespace lockstep::nn

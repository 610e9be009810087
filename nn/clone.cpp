#include <lockstep/nn/clone.h>

#include <algorithm>
#include <mutex>

#include <lockstep/nn/entries.h>
#include <lockstep/tensor/node.h>

namespace lockstep::nn {
namespace {
std::recursive_mutex& cloning() {  // recursive: a module may clone another to copy itself
  static std::recursive_mutex mutex;
  return mutex;
}
}  // namespace

CloneMap::CloneMap(bool share) : share_(share) { cloning().lock(); }
CloneMap::~CloneMap() { cloning().unlock(); }

Tensor CloneMap::operator()(const Tensor& t) {
  if (share_ || !t.defined()) return t;
  const NoGradGuard guard;
  Tensor copy;
  for (auto& [from, to] : made_) {
    if (from.is_same(t)) return to;
    if (detail::same_elements(from, t)) copy = to.detach();
  }
  if (!copy.defined()) copy = t.clone();
  if (t.requires_grad()) copy.requires_grad_();
  made_.emplace_back(t, copy);
  return copy;
}

void detail::check_all_fields_named(Module& module, const char* op) {
  check_not_moved_from(module);
  Entries entries = entries_of(module);
  const ModuleType type = module.module_type();
  const uintptr_t begin = reinterpret_cast<uintptr_t>(&module);
  for (const Entries::Field& f : entries.fields)
    LOCKSTEP_CHECK(f.at >= begin && f.at + f.size <= begin + type.size, Error, op, ": ", type.name,
                   " names ", f.name, ", which is a reference to something outside; make it a ",
                   "std::reference_wrapper, which the copy shares");
  std::sort(entries.fields.begin(), entries.fields.end(),
            [](auto& a, auto& b) { return a.at < b.at; });
  entries.fields.push_back({"", begin + type.size, 0, type.alignment});
  // A gap larger than padding holds a member that is not named, maybe more than a plain value.
  uintptr_t covered = begin + sizeof(Module);
  std::string before = "first member";
  for (const Entries::Field& f : entries.fields) {
    LOCKSTEP_CHECK(
        f.at < covered + std::max<size_t>(f.alignment, sizeof(void*)), Error, op, ": ", type.name,
        " has ", f.at - covered, " bytes ",
        before == "first member" ? "before its first named member" : "after " + before,
        " that LOCKSTEP_MODULE does not name; name every member there, plain values too");
    covered = std::max(covered, f.at + f.size);
    before = f.name;
  }
}

}  // namespace lockstep::nn

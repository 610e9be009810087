#include <lockstep/nn/registry.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace lockstep::nn::detail {
namespace {

struct LivingPart {
  Part what;
  uint64_t birth;
  bool named = false;  // by a module's fields
};
struct Registry {
  std::mutex lock;
  std::map<uintptr_t, LivingPart> parts;
  std::atomic<uint64_t> births = 0;
};
// Never destroyed: a module with static lifetime may outlive everything in this file.
Registry& registry() {
  static Registry& r = *new Registry;
  return r;
}

uintptr_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }

/// The field around `at`, else the last one before it: how an error says where something without a
/// name stands.
std::string place_of(uintptr_t at, const Entries& entries) {
  const Entries::Field* before = nullptr;
  for (const Entries::Field& f : entries.fields) {
    if (f.at <= at && at < f.at + f.size)
      return str_cat("inside ", f.name, ", whose type should be a Module to name it");
    if (f.at < at && (!before || f.at > before->at)) before = &f;
  }
  return before ? str_cat("after ", before->name) : std::string("before all of them");
}

std::string type_of(uintptr_t at, Part what) {
  switch (what) {
    case Part::parameter: return "Parameter";
    case Part::buffer: return "Buffer";
    case Part::list: return "PositionalModules";
    case Part::module: break;
  }
  return reinterpret_cast<Module*>(at)->module_type().name;
}

/// The word at an address, whatever is there: a plain member may be in use by another thread.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
uintptr_t word_at(uintptr_t at) {
  return *reinterpret_cast<const volatile uintptr_t*>(at);
}

}  // namespace

void part_appears(const void* at, Part what) noexcept try {
  Registry& r = registry();
  const std::lock_guard guard(r.lock);
  r.parts[address(at)] = {what, ++r.births};
} catch (const std::bad_alloc&) {
}
void module_moves(const void* to, const void* from) noexcept try {
  Registry& r = registry();
  const std::lock_guard guard(r.lock);
  const auto old = r.parts.find(address(from));
  const uint64_t now = ++r.births;
  r.parts[address(to)] = {Part::module, old == r.parts.end() ? now : old->second.birth};
} catch (const std::bad_alloc&) {
}
void part_disappears(const void* at) noexcept {
  const std::lock_guard guard(registry().lock);
  registry().parts.erase(address(at));
}
uint64_t parts_constructed() { return registry().births.load(std::memory_order_relaxed); }

void check_fields(Module& module, const Entries& entries, std::vector<Unnamed>& pointed) {
  struct Range {
    uintptr_t begin, end;
  };
  std::vector<Range> named;
  auto add = [&](const void* at, size_t size) {
    named.push_back({address(at), address(at) + size});
  };
  for (auto& [name, p] : entries.parameters) add(p, sizeof *p);
  for (auto& [name, b] : entries.buffers) add(b, sizeof *b);
  for (auto& [name, m] : entries.modules) add(m, m->module_type().size);
  for (const void* list : entries.lists) add(list, sizeof(PositionalModules));
  const auto is_named = [&](uintptr_t at) {
    return std::any_of(named.begin(), named.end(),
                       [&](const Range& n) { return at >= n.begin && at < n.end; });
  };
  // What the fields name was checked when it was compiled, and may hold stale bytes, as an empty
  // std::optional does.
  const auto in_field = [&](uintptr_t at) {
    return std::any_of(entries.fields.begin(), entries.fields.end(),
                       [&](const Entries::Field& f) { return at >= f.at && at < f.at + f.size; });
  };
  const ModuleType type = module.module_type();
  const uintptr_t begin = address(&module), end = begin + type.size;
  const auto error = [&](uintptr_t part, Part what, uintptr_t member, const char* how) {
    return str_cat(type.name, ": a member ", how, " ", type_of(part, what), " (",
                   place_of(member, entries), ", at byte ", member - begin,
                   ") is not named in LOCKSTEP_MODULE(", type.name,
                   ", ...), so it would not be trained, moved or saved; add it there");
  };

  Registry& r = registry();
  const std::lock_guard guard(r.lock);
  const auto mark = [&](const void* at) {
    if (const auto it = r.parts.find(address(at)); it != r.parts.end()) it->second.named = true;
  };
  // A part for which there was no memory when it was constructed is registered here.
  const auto mark_own = [&](const void* at, Part what) {
    const auto [it, unknown] = r.parts.try_emplace(address(at));
    if (unknown) it->second = {what, ++r.births};
    it->second.named = true;
  };
  for (auto& [name, p] : entries.parameters) mark_own(p, Part::parameter);
  for (auto& [name, b] : entries.buffers) mark_own(b, Part::buffer);
  for (auto& [name, m] : entries.modules) mark_own(m, Part::module);
  for (const void* list : entries.lists) mark_own(list, Part::list);
  for (auto& [part, m] : entries.references) mark(part);
  for (auto it = r.parts.upper_bound(begin); it != r.parts.end() && it->first < end; ++it)
    if (!is_named(it->first)) throw Error(error(it->first, it->second.what, it->first, "of type"));

  const auto self = r.parts.find(begin);
  for (uintptr_t at = begin + sizeof(Module); at + sizeof(uintptr_t) <= end; at += alignof(void*)) {
    if (is_named(at) || in_field(at)) continue;
    const auto part = r.parts.find(word_at(at));
    if (part == r.parts.end() || part->second.named || self == r.parts.end() ||
        part->second.birth < self->second.birth)
      continue;
    pointed.push_back({error(part->first, part->second.what, at, "that holds or points to a"),
                       reinterpret_cast<const void*>(part->first)});
  }
}

void check_still_unnamed(const std::vector<Unnamed>& pointed) {
  if (pointed.empty()) return;
  Registry& r = registry();
  const std::lock_guard guard(r.lock);
  for (const Unnamed& u : pointed)
    if (const auto it = r.parts.find(address(u.part)); it != r.parts.end() && !it->second.named)
      throw Error(u.error);
}

BodyUse use_of(const TensorBody* body) {
  Registry& r = registry();
  const std::lock_guard guard(r.lock);
  BodyUse use;
  for (const auto& [at, part] : r.parts) {
    const Tensor* t = part.what == Part::parameter ? reinterpret_cast<const Parameter*>(at)
                      : part.what == Part::buffer  ? reinterpret_cast<const Buffer*>(at)
                                                   : static_cast<const Tensor*>(nullptr);
    if (!t || t->ref().get() != body) continue;
    use.lives = true;
    use.named |= part.named;
  }
  return use;
}

}  // namespace lockstep::nn::detail

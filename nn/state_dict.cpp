// Saving and loading a module by the names of its tensors.
#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_set>

#include <lockstep/nn/entries.h>
#include <lockstep/tensor/error_context.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/safetensors.h>
#include <lockstep/tensor/state_reader.h>

namespace lockstep::nn {
namespace {

/// One of a module's tensors with all its names; several where it is tied.
struct Target {
  Tensor mine;  // shares the data
  std::vector<std::string> names;
};

/// In the order of state_dict().
std::vector<Target> targets_of(const Module& module) {
  const NamedTensors state = module.state_dict();
  std::vector<Tensor> tensors;
  for (auto& [name, t] : state) tensors.push_back(t);
  const std::vector<size_t> first = detail::first_of_same(tensors);
  std::vector<Target> targets;
  std::vector<size_t> position(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (first[i] == i) {
      position[i] = targets.size();
      targets.push_back({tensors[i], {}});
    }
    targets[position[first[i]]].names.push_back(state[i].first);
  }
  return targets;
}

bool same_bits(const Tensor& a, const Tensor& b) {  // of one shape, dtype and device
  const Tensor x = a.to(Device()).contiguous(), y = b.to(Device()).contiguous();
  return std::memcmp(x.data_ptr(), y.data_ptr(),
                     static_cast<size_t>(x.numel()) * size_of(x.dtype())) == 0;
}

/// What precedes each of `names` among `longer`: "module." for weights saved from a wrapper,
/// "backbone." for those of a part. Empty unless one text serves for all.
std::string common_prefix(const std::vector<std::string>& names,
                          const std::vector<std::string>& longer) {
  const std::unordered_set<std::string> known(longer.begin(), longer.end());
  std::string found;
  for (const std::string& name : longer) {
    if (names.empty() || !name.ends_with("." + names[0])) continue;
    const std::string prefix = name.substr(0, name.size() - names[0].size());
    if (!std::all_of(names.begin(), names.end(),
                     [&](const std::string& n) { return known.contains(prefix + n); }))
      continue;
    if (!found.empty()) return {};  // several parts of the same names
    found = prefix;
  }
  return found;
}

std::string hint(const Misfits& misfits, bool some_fit) {
  if (const std::string p = common_prefix(misfits.missing, misfits.unexpected); !p.empty())
    return str_cat("\n  the names given begin with '", p,
                   "', and those here do not: give them without it");
  if (const std::string p = common_prefix(misfits.unexpected, misfits.missing); !p.empty())
    return str_cat("\n  the names here begin with '", p,
                   "', and those given do not: give them with it, or load into that part");
  if (!misfits.values_fit()) return {};
  return some_fit ? "\n  pass {.strict = false} to load those that fit"
                  : "\n  no name fits: they are of another model";
}

}  // namespace

NamedTensors Module::state_dict() const {
  NamedTensors state;
  detail::for_each_module(*this,
                          [&](const std::string& path, Module& m, const detail::Entries& entries) {
                            detail::check_not_moved_from(m);
                            const std::string prefix = path.empty() ? "" : path + ".";
                            for (auto& [name, p] : entries.parameters)
                              if (p->defined()) state.emplace_back(prefix + name, p->detach());
                            for (auto& [name, b] : entries.buffers)
                              if (b->defined() && b->is_persistent())
                                state.emplace_back(prefix + name, b->detach());
                          });
  return state;
}

LoadResult Module::load_state_dict(const NamedTensors& state, LoadOptions options) {
  const NoGradGuard guard;
  Misfits misfits;
  std::vector<std::pair<Tensor, Tensor>> copies;  // to, from
  std::map<std::string, Tensor> given;
  for (auto& [name, t] : state)
    if (!given.emplace(name, t).second) misfits.wrong.push_back(name + " (given twice)");
  const std::vector<Target> targets = targets_of(*this);
  std::unordered_set<const void*> written;  // storages
  for (const Target& target : targets) written.insert(target.mine.storage().data());
  for (auto& [mine, names] : targets) {
    // A state dict may hold a tied tensor under one of its names, or under all.
    Tensor from;
    std::string from_name;
    bool any = false;
    for (const std::string& name : names) {
      const auto entry = given.extract(name);
      if (entry.empty()) continue;
      any = true;
      const Tensor& t = entry.mapped();
      if (!t.defined() || t.shape() != mine.shape()) {
        misfits.misshapen.push_back(str_cat(name, " (given ",
                                            t.defined() ? str_cat(t.shape()) : "none", ", here ",
                                            mine.shape(), ")"));
        continue;
      }
      // Converted now, so that nothing has been changed when memory runs out.
      Tensor converted = t.detach().to(mine.dtype()).to(mine.device());
      if (written.contains(converted.storage().data()) && !detail::same_elements(mine, converted))
        converted = converted.clone();  // e.g. two layers of this module exchanged
      if (!from.defined()) {
        from = converted;
        from_name = name;
      } else if (!same_bits(from, converted)) {
        misfits.wrong.push_back(
            str_cat(name, " (tied to ", from_name, " here, and given other values)"));
      }
    }
    if (from.defined()) copies.emplace_back(mine, from);
    if (!any) misfits.missing.insert(misfits.missing.end(), names.begin(), names.end());
  }
  for (auto& [name, t] : given) misfits.unexpected.push_back(name);
  LOCKSTEP_CHECK(misfits.values_fit() && (misfits.names_fit() || !options.strict), ValueError,
                 "load_state_dict: the tensors given do not fit ", module_type().name,
                 misfits.text(), hint(misfits, !copies.empty()));
  for (auto& [to, from] : copies) to.storage().check_writable("load_state_dict");
  for (auto& [to, from] : copies) to.copy_(from);
  return {std::move(misfits.missing), std::move(misfits.unexpected)};
}

void Module::save(const std::string& path) const { save_safetensors(path, state_dict()); }
LoadResult Module::load(const std::string& path, LoadOptions options) {
  const Safetensors file = load_safetensors(path);
  const NamedTensors mine = state_dict();
  for (const auto& unsupported : file.unsupported)
    if (options.strict || std::any_of(mine.begin(), mine.end(), [&](const auto& entry) {
          return entry.first == unsupported.name;
        }))
      file.at(unsupported.name);  // throws
  try {
    return load_state_dict(file.tensors, options);
  } catch (...) {
    lockstep::detail::rethrow_with_context(str_cat("in load of ", path));
  }
}

}  // namespace lockstep::nn

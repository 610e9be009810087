// Saving and loading a module by the names of its tensors.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <lockstep/nn/entries.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::nn {
namespace {

std::string list(const char* title, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names)
    text += (text.empty() ? str_cat("\n  ", title, ": ") : ", ") + name;
  return text;
}

}  // namespace

NamedTensors Module::state_dict() const {
  NamedTensors state;
  detail::for_each_module(*this, "",
                          [&](const std::string& path, Module&, const detail::Entries& entries) {
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
  LoadResult result;
  std::vector<std::string> misshapen;
  std::vector<std::pair<Tensor, Tensor>> copies;  // to, from
  std::unordered_map<std::string, Tensor> given(state.begin(), state.end());
  LOCKSTEP_CHECK(given.size() == state.size(), ValueError,
                 "load_state_dict: the state has two tensors of one name");
  const NamedTensors all = state_dict();
  // A file may name only one of several tied tensors, which gives all of them their values.
  const auto tied_to_given = [&](const Tensor& missing) {
    return std::any_of(all.begin(), all.end(), [&](const auto& other) {
      return given.contains(other.first) && missing.numel() > 0 &&
             other.second.data_ptr() == missing.data_ptr() &&
             other.second.shape() == missing.shape() && other.second.strides() == missing.strides();
    });
  };
  std::unordered_set<std::string> known;
  for (auto& [name, mine] : all) {
    known.insert(name);
    const auto it = given.find(name);
    if (it == given.end()) {
      if (!tied_to_given(mine)) result.missing.push_back(name);
    } else if (it->second.shape() != mine.shape())
      misshapen.push_back(
          str_cat(name, " (given ", it->second.shape(), ", here ", mine.shape(), ")"));
    else
      copies.emplace_back(mine, it->second);
  }
  for (auto& [name, t] : state)
    if (!known.contains(name)) result.unexpected.push_back(name);
  const bool names_fit = result.missing.empty() && result.unexpected.empty();
  LOCKSTEP_CHECK(misshapen.empty() && (names_fit || !options.strict), ValueError,
                 "load_state_dict: the tensors given do not fit ", module_type().name,
                 list("missing", result.missing), list("unexpected", result.unexpected),
                 list("of another shape", misshapen),
                 misshapen.empty() ? "\n  pass {.strict = false} to load those that fit" : "");
  const NoGradGuard guard;
  for (auto& [to, from] : copies) to.copy_(from.detach().to(to.device()));
  return result;
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
  return load_state_dict(file.tensors, options);
}

}  // namespace lockstep::nn

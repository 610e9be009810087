// Loading a checkpoint: rank 0 reads the file and broadcasts it, each rank loads its parts, and all
// restore the old state if one of them fails.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include <lockstep/distributed/checkpoints/agreement.h>
#include <lockstep/distributed/checkpoints/format.h>
#include <lockstep/tensor/error_context.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::dist {
namespace {

using namespace checkpoint_format;

/// What names_of() made, for a message: 'model', 'optimizer'.
std::string listed(const std::string& names) {
  std::string text = "'";
  for (char c : names) text += c == '.' ? std::string("', '") : std::string(1, c);
  return text + "'";
}

Safetensors read(const std::string& path, const Checkpoint& run) {
  Safetensors file = load_safetensors(path);
  const auto version = file.metadata.find(kVersionKey);
  LOCKSTEP_CHECK(version != file.metadata.end(), IoError, "load_checkpoint: ", path,
                 ": it is a safetensors file but no checkpoint; Module::load reads models");
  LOCKSTEP_CHECK(version->second == kVersion, IoError, "load_checkpoint: ", path,
                 ": it has version ", version->second, " of the format, and only version ",
                 kVersion, " is read");
  LOCKSTEP_CHECK(file.unsupported.empty(), IoError, "load_checkpoint: ", path, ": entry '",
                 file.unsupported[0].name, "' ", file.unsupported[0].reason);
  LOCKSTEP_CHECK(file.find(kGenerators), IoError, "load_checkpoint: ", path,
                 ": entry 'generator' is missing; the file is damaged");
  std::set<std::string> here, there;
  for (const CheckpointPart& p : run.parts) here.insert(p.name());
  std::string names = file.metadata[kPartsKey];
  for (size_t end; !names.empty(); names.erase(0, end)) {
    end = names.find('.');
    there.insert(names.substr(0, end));
    if (end != std::string::npos) ++end;
  }
  LOCKSTEP_CHECK(here == there, ValueError, "load_checkpoint: ", path, ": it has the parts ",
                 listed(file.metadata[kPartsKey]), ", and the program gives ",
                 listed(names_of(run.parts)), "; give the same ones");
  return file;
}

/// The rank that an entry belongs to, and its name within the part's state.
struct Place {
  int64_t rank = 0;
  std::string entry;
};

/// Of "part", "part.entry", or for a part of each rank "part.rank.3", "part.rank.3.entry"; null for
/// any other name, and a rank that the saving run did not have.
std::optional<Place> place_of(std::string_view name, const CheckpointPart& part,
                              int64_t saved_ranks) {
  // Takes `begin` and a dot, or all there is, off the front.
  const auto take = [&name](std::string_view begin) {
    if (!name.starts_with(begin)) return false;
    name.remove_prefix(begin.size());
    if (name.empty()) return true;
    const bool dot = name.front() == '.';
    name.remove_prefix(1);
    return dot && !name.empty();
  };
  Place place;
  if (!take(part.name())) return std::nullopt;
  if (part.per_rank()) {
    if (!take("rank")) return std::nullopt;
    const std::string_view digits = name.substr(0, name.find('.'));
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), place.rank);
    if (error != std::errc() || place.rank < 0 || place.rank >= saved_ranks) return std::nullopt;
    if (digits != str_cat(place.rank) || !take(digits)) return std::nullopt;
  }
  place.entry = name;
  return place;
}

/// What the file has for each part on this rank; null for a part of each rank if the number of ranks
/// has changed.
std::vector<std::optional<NamedTensors>> sorted_by_part(const NamedTensors& file,
                                                        const Checkpoint& run,
                                                        int64_t saved_ranks) {
  const auto& parts = run.parts;
  std::vector<std::optional<NamedTensors>> states(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    if (!parts[i].per_rank() || saved_ranks == run.group.size()) states[i].emplace();
  for (const auto& [name, value] : file) {
    if (name == kGenerators) continue;
    std::optional<Place> place;
    size_t i = 0;
    while (i < parts.size() && !(place = place_of(name, parts[i], saved_ranks))) ++i;
    LOCKSTEP_CHECK(place, ValueError, "unexpected entry '", name, "'; the parts are ",
                   listed(names_of(parts)));
    const bool mine = !parts[i].per_rank() || place->rank == run.group.rank();
    if (mine && states[i]) states[i]->emplace_back(place->entry, value);
  }
  return states;
}

NamedTensors copy_of(const NamedTensors& state) {
  NamedTensors copies;
  for (const auto& [name, value] : state) copies.emplace_back(name, value.detach().clone());
  return copies;
}

/// Loads part by part, and can undo it.
class Loading {
 public:
  explicit Loading(const Checkpoint& run) : parts_(run.parts) {}

  void load(const std::vector<std::optional<NamedTensors>>& states) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      std::optional<NamedTensors> before;
      if (states[i]) {
        before = copy_of(parts_[i].state());
        try {
          parts_[i].load(*states[i]);
        } catch (...) {
          lockstep::detail::rethrow_with_context(str_cat("in part '", parts_[i].name(), "'"));
        }
      }
      before_.push_back(std::move(before));
    }
  }
  /// The names of parts that do not take their old state back, which is empty unless they break
  /// their own rules.
  std::string undo() const {
    std::string stuck;
    for (size_t i = before_.size(); i-- > 0;) try {
        if (before_[i]) parts_[i].load(*before_[i]);
      } catch (...) {
        stuck += str_cat(stuck.empty() ? "'" : ", '", parts_[i].name(), "'");
      }
    return stuck;
  }

 private:
  const std::vector<CheckpointPart>& parts_;
  std::vector<std::optional<NamedTensors>> before_;
};

}  // namespace

bool load_checkpoint(const std::string& path, const Checkpoint& run) {
  const Group& group = run.group;
  bool found = false;
  NamedTensors entries;
  all_or_none(group, [&] {
    check_names("load_checkpoint", run.parts);
    std::error_code ignored;  // load_safetensors reports a file that cannot be read
    found = group.is_main() &&
            std::filesystem::status(path, ignored).type() != std::filesystem::file_type::not_found;
    if (found) entries = read(path, run).tensors;
  });
  const Tensor there = tensor<int64_t>({found});
  group.broadcast(there, 0, {.label = "whether there is a checkpoint"});
  if (there.item<int64_t>() == 0) return false;
  entries = broadcast_named(group, std::move(entries), 0);

  Loading loading(run);
  Generator generator;
  int64_t saved_ranks = 0;
  const auto fit = [&] {
    try {
      const auto saved = std::find_if(entries.begin(), entries.end(),
                                      [](const auto& e) { return e.first == kGenerators; });
      generator = own_generator(saved->second, group);
      saved_ranks = saved->second.size(0);
      loading.load(sorted_by_part(entries, run, saved_ranks));
    } catch (...) {
      lockstep::detail::rethrow_with_context(str_cat("in load_checkpoint of ", path));
    }
  };
  try {
    all_or_none(group, fit);
  } catch (...) {
    const std::string stuck = loading.undo();
    if (stuck.empty()) throw;
    lockstep::detail::rethrow_with_context(str_cat(
        "and the old state of ", stuck, " could not be restored: do not go on with this run"));
  }
  default_generator() = generator;
  for (const CheckpointPart& part : run.parts)
    if (part.per_rank() && saved_ranks != group.size() && group.is_main())
      warn("load_checkpoint: ", path, ": each of ", saved_ranks, " ranks had its own '",
           part.name(), "', and there are ", group.size(), " now; it starts anew");
  return true;
}

}  // namespace lockstep::dist

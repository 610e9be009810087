// The parts of a run, and saving them.
#include <lockstep/distributed/checkpoint.h>

#include <algorithm>
#include <set>

#include <lockstep/distributed/checkpoints/agreement.h>
#include <lockstep/distributed/checkpoints/format.h>
#include <lockstep/tensor/error_context.h>
#include <lockstep/tensor/node.h>

namespace lockstep::dist {
namespace checkpoint_format {

std::string prefix_of(const CheckpointPart& part, int rank) {
  return part.per_rank() ? str_cat(part.name(), ".rank.", rank) : part.name();
}

std::string names_of(const std::vector<CheckpointPart>& parts) {
  std::string all;
  for (const CheckpointPart& p : parts) all += (all.empty() ? "" : ".") + p.name();
  return all;
}

void check_names(const char* op, const std::vector<CheckpointPart>& parts) {
  std::set<std::string> names{kGenerators};
  for (const CheckpointPart& p : parts) {
    LOCKSTEP_CHECK(!p.name().empty() && p.name().find('.') == std::string::npos, ValueError, op,
                   ": a part's name is not empty and has no '.', got '", p.name(), "'");
    LOCKSTEP_CHECK(
        names.insert(p.name()).second, ValueError, op, ": the part '", p.name(),
        p.name() == kGenerators ? "' has the name of the generators' entry" : "' is given twice",
        "; rename one");
  }
}

}  // namespace checkpoint_format

CheckpointPart::CheckpointPart(std::string name, State state, Load load,
                               CheckpointPartOptions options)
    : name_(std::move(name)), state_(std::move(state)), load_(std::move(load)), options_(options) {}

CheckpointPart::CheckpointPart(std::string name, double& value, CheckpointPartOptions options)
    : CheckpointPart(
          std::move(name),
          [&value] {
            return NamedTensors{{"", scalar(value, {.dtype = DType::f64})}};
          },
          [&value](const NamedTensors& state) {
            StateReader in("a number", state);
            const double loaded = in.number("");
            in.finish();
            value = loaded;
          },
          options) {}

CheckpointPart::CheckpointPart(std::string name, Tensor& value, CheckpointPartOptions options)
    : CheckpointPart(
          std::move(name),
          [&value] {
            return NamedTensors{{"", value}};
          },
          [&value](const NamedTensors& state) {
            StateReader in("a tensor", state);
            const Tensor loaded = in.tensor("");
            in.finish();
            LOCKSTEP_CHECK(loaded.dtype() == value.dtype() && loaded.shape() == value.shape(),
                           ValueError, "the tensor of the file is ", loaded.dtype(), " ",
                           loaded.shape(), ", the program's ", value.dtype(), " ", value.shape());
            const NoGradGuard guard;
            value.detach().copy_(loaded.to(value.device()));
          },
          options) {}

int64_t CheckpointPart::integer_of(const NamedTensors& state) {
  StateReader in("a number", state);
  const int64_t value = in.integer("");
  in.finish();
  return value;
}

// Every step that can fail on one rank alone runs inside all_or_none.
void save_checkpoint(const std::string& path, const Checkpoint& run) {
  using namespace checkpoint_format;
  const Group& group = run.group;
  NamedTensors entries;  // on rank 0 the file's; elsewhere those of parts held by each rank
  all_or_none(group, [&] {
    check_names("save_checkpoint", run.parts);
    for (const CheckpointPart& part : run.parts) {
      if (!group.is_main() && !part.per_rank()) continue;
      try {
        for (auto& [name, value] : part.state())
          entries.emplace_back(prefix_of(part, group.rank()) + (name.empty() ? "" : ".") + name,
                               value.detach());
      } catch (...) {
        lockstep::detail::rethrow_with_context(
            str_cat("in part '", part.name(), "'\n  in save_checkpoint of ", path));
      }
    }
  });
  const bool by_rank =
      std::any_of(run.parts.begin(), run.parts.end(), [](auto& p) { return p.per_rank(); });
  for (int r = 1; by_rank && r < group.size(); ++r) {
    const NamedTensors theirs =
        broadcast_named(group, group.rank() == r ? entries : NamedTensors(), r);
    if (group.is_main()) entries.insert(entries.end(), theirs.begin(), theirs.end());
  }
  entries.emplace_back(kGenerators, all_generators(group));
  all_or_none(group, [&] {
    if (group.is_main())
      save_safetensors(path, entries, {{kVersionKey, kVersion}, {kPartsKey, names_of(run.parts)}});
  });
}

}  // namespace lockstep::dist

// Checkpoints: the state of a training run in one safetensors file, from which it goes on after a
// stop, also on another number of ranks.
//
//   dist::Checkpoint run{group, {{"model", net}, {"optimizer", opt}, {"schedule", schedule},
//                                {"loader", loader}, {"best", best_accuracy}}};
//   dist::load_checkpoint("run.safetensors", run);   // false when there is none yet
//   for (int64_t epoch = loader.state().epoch; epoch < epochs; ++epoch)
//     for (auto [x, y] : loader.epoch(epoch)) {
//       ...
//       dist::save_checkpoint("run.safetensors", run);
//     }
//
// Save between steps, not inside an accumulation window: gradients are no part of it.
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/distributed/group.h>
#include <lockstep/tensor/state_reader.h>

namespace lockstep::dist {

/// Modules, DistributedDataParallel, optimizers, schedules, loaders, and every other type with these
/// two. If the state does not fit, load_state_dict throws and changes nothing.
template <class T>
concept Stateful = requires(T& object, const NamedTensors& state) {
  { object.state_dict() } -> std::convertible_to<NamedTensors>;
  object.load_state_dict(state);
};

struct CheckpointPartOptions {
  /// Every rank has a state of its own, such as the error feedback of a compression. All are saved,
  /// and each rank gets its own back. At another number of ranks they are not loaded: a warning says
  /// so, and the object stays as it is.
  bool per_rank = false;
};

/// A named part of a run. It refers to the object, which must outlive it.
class LOCKSTEP_API CheckpointPart {
 public:
  /// `name` is not empty and has no '.'; entries of the file are called name.entry.
  template <Stateful T>
  CheckpointPart(std::string name, T& object, CheckpointPartOptions options = {})
      : CheckpointPart(
            std::move(name), [&object] { return NamedTensors(object.state_dict()); },
            [&object](const NamedTensors& state) { object.load_state_dict(state); }, options) {}
  /// A number of the program; its entry is called name.
  template <std::integral N>
  CheckpointPart(std::string name, N& value, CheckpointPartOptions options = {})
      : CheckpointPart(
            std::move(name),
            [&value] {
              return NamedTensors{{"", integer_entry(static_cast<int64_t>(value))}};
            },
            [&value](const NamedTensors& state) {
              const int64_t loaded = integer_of(state);
              LOCKSTEP_CHECK(static_cast<int64_t>(static_cast<N>(loaded)) == loaded, ValueError,
                             "the number ", loaded, " does not fit the program's type");
              value = static_cast<N>(loaded);
            },
            options) {}
  CheckpointPart(std::string name, double& value, CheckpointPartOptions options = {});
  /// A tensor; loading keeps its dtype and shape, which must be those of the file.
  CheckpointPart(std::string name, Tensor& value, CheckpointPartOptions options = {});

  const std::string& name() const { return name_; }
  bool per_rank() const { return options_.per_rank; }
  NamedTensors state() const { return state_(); }
  void load(const NamedTensors& state) const { load_(state); }

 private:
  using State = std::function<NamedTensors()>;
  using Load = std::function<void(const NamedTensors&)>;
  CheckpointPart(std::string name, State state, Load load, CheckpointPartOptions options);
  static int64_t integer_of(const NamedTensors& state);

  std::string name_;
  State state_;
  Load load_;
  CheckpointPartOptions options_;
};

/// The parts of a run, the same on every rank. The default generators of all ranks are always
/// included.
struct Checkpoint {
  Group group;
  std::vector<CheckpointPart> parts;
};

/// Writes the file on rank 0, from rank 0's objects, atomically (see write_file_atomically in
/// file.h). Throws on every rank when it fails on one (IoError: the folder is missing, the
/// disk is full; ValueError: two parts of one name). A collective call.
LOCKSTEP_API void save_checkpoint(const std::string& path, const Checkpoint& run);

/// Reads the file on rank 0, which alone needs to see it, and gives every rank the same state;
/// false on every rank when there is no such file. The number of ranks may differ from the saving
/// run's. All or nothing: when the file is damaged (IoError) or some entry does not fit on some
/// rank (ValueError, naming file, part and entry), every rank throws, and nothing has changed on
/// any. A collective call.
LOCKSTEP_API bool load_checkpoint(const std::string& path, const Checkpoint& run);

}  // namespace lockstep::dist

// Optimizer: what every optimizer has in common: groups of parameters, clearing gradients, learning
// rates and a state that can be saved.
//
//   optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
//   optim::AdamW opt{{{.params = decayed, .options = {.lr = 3e-4}},
//                     {.params = others, .options = {.lr = 3e-4, .weight_decay = 0}}}};
//   opt.options(1).weight_decay = 0.1;             // groups' options may be changed at any time
//
// An optimizer of one's own derives from this and writes step() with tensor ops under NoGradGuard,
// lr_of(), and state_names() and visit_options() for what is to be saved.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/optim/update.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::optim {

/// Parameters that share their options.
template <class Options>
struct ParamGroup {
  std::vector<Tensor> params;  // may be empty
  Options options = {};
};

class ScheduleChain;

/// Parameters are identified by their tensors: a module's to() and load() change the storage inside
/// these, whereas assignment to a Parameter replaces the tensor, and an optimizer made before keeps
/// the old one, as in PyTorch. Schedules follow an optimizer that is moved.
class LOCKSTEP_API Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;

  /// Updates every parameter that has a gradient; the others stay as they are.
  virtual void step() = 0;
  /// Clears the gradients: to undefined, or to zeros in place.
  void zero_grad(bool set_to_none = true);

  int groups() const { return groups_; }
  std::vector<Tensor> params(int group) const;
  double lr(int group = 0) const;
  /// Schedules continue from a rate that was set by hand, as in PyTorch: their next step multiplies
  /// it by the ratio by which it would have changed the old one. Where they hold the rate at 0
  /// there is no such ratio, and it lasts until their next step.
  void set_lr(double lr);  // of all groups
  void set_lr(int group, double lr);
  /// The rate that the group's schedules start from; without schedules the rate itself.
  double initial_lr(int group) const;

  /// Everything that is needed to resume: "state.3.exp_avg" and "state.3.step" by the parameter's
  /// index over all groups, "param_groups.0.params", their number, "param_groups.0.lr" and so on by
  /// group. Copies; for save_safetensors.
  NamedTensors state_dict() const;
  /// Throws ValueError that lists all entries that are missing, unexpected or of another form, and
  /// has changed nothing then. Floating dtypes are converted to the parameters'.
  void load_state_dict(const NamedTensors& state);

 protected:
  static constexpr int kMaxState = ParameterUpdates::kMaxState;
  struct Param {
    Tensor tensor;
    int group;
    Ref<Cell<UpdateCount>> count = make_ref<Cell<UpdateCount>>();
    std::array<Tensor, kMaxState> state = {};  // undefined until the first update
    int64_t& steps() { return count->value.steps; }
    int64_t steps() const { return count->value.steps; }
  };
  /// Leaves, each once, and at least one in all; else ValueError.
  explicit Optimizer(std::vector<std::vector<Tensor>> groups);

  /// Names of the state tensors a parameter can have, in order; at most kMaxState.
  virtual std::vector<std::string> state_names() const = 0;
  /// How many of them a parameter of the group needs for its next step, as the options are now.
  virtual int states(int /*group*/) const { return 0; }
  /// Throws ValueError for options that make no sense.
  virtual void check_options(int /*group*/) const {}
  /// Calls visit(name, value) for each option of a group. The visitor may change the value.
  using OptionVisitor = std::function<void(const char* name, double& value)>;
  virtual void visit_options(int group, const OptionVisitor& visit) = 0;
  virtual double& lr_of(int group) = 0;

  std::vector<Param> params_;

 private:
  friend class ScheduleChain;
  friend class LRScheduler;

  int groups_;
  std::shared_ptr<ScheduleChain> schedules_;
};

namespace detail {
/// ValueError unless the condition holds; for options, which name themselves.
LOCKSTEP_API void check_option(bool ok, const char* optimizer, const char* rule, double value);
}  // namespace detail

}  // namespace lockstep::optim

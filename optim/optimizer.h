// Optimizer: what every optimizer has in common: groups of parameters, clearing gradients, learning
// rates and a state that can be saved.
//
//   optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
//   optim::AdamW opt{{{.params = decayed, .options = {.lr = 3e-4}},
//                     {.params = others, .options = {.lr = 3e-4, .weight_decay = 0}}}};
//
// An optimizer of one's own derives from this and writes step() with tensor ops under NoGradGuard.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::optim {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

/// Parameters that share their options.
template <class Options>
struct ParamGroup {
  std::vector<Tensor> params;
  Options options = {};
};

class LOCKSTEP_API Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&&) = default;

  /// Updates every parameter that has a gradient; the others stay as they are.
  virtual void step() = 0;
  /// Clears the gradients: to undefined, or to zeros in place.
  void zero_grad(bool set_to_none = true);

  int groups() const { return static_cast<int>(initial_lr_.size()); }
  std::vector<Tensor> params(int group) const;
  double lr(int group = 0) const;
  void set_lr(double lr);  // of all groups
  void set_lr(int group, double lr);
  /// The rate that schedules scale: the group's when the first schedule met it, or loaded.
  double initial_lr(int group);

  /// Everything a run needs to go on: "state.3.exp_avg" and "state.3.step" by the parameter's index
  /// over all groups, "param_groups.0.lr" and so on by group. Copies; for save_safetensors.
  NamedTensors state_dict() const;
  /// Throws ValueError, and changes nothing, when groups, names or shapes do not fit.
  void load_state_dict(const NamedTensors& state);

 protected:
  static constexpr int kMaxState = 3;
  struct Param {
    Tensor tensor;
    int group;
    int64_t steps = 0;                    // updates this parameter has had
    std::array<Tensor, kMaxState> state;  // undefined until the first
  };
  /// Leaves, each once; else ValueError.
  explicit Optimizer(std::vector<std::vector<Tensor>> groups);

  /// Names of the state tensors a parameter can have, in order; at most kMaxState.
  virtual std::vector<std::string> state_names() const = 0;
  /// Calls visit(name, value) for each option of a group. The visitor may change the value.
  using OptionVisitor = std::function<void(const char* name, double& value)>;
  virtual void visit_options(int group, const OptionVisitor& visit) = 0;
  virtual double& lr_of(int group) = 0;

  std::vector<Param> params_;

 private:
  std::vector<double> initial_lr_;  // NaN until a schedule asks
};

namespace detail {
/// ValueError unless the condition holds; for options, which name themselves.
LOCKSTEP_API void check_option(bool ok, const char* optimizer, const char* rule, double value);
}  // namespace detail

}  // namespace lockstep::optim

// FusedOptimizer: an optimizer whose update is the same formula for every element. All parameters
// are updated in one pass over memory: one parallel loop over fixed blocks of all tensors, whatever
// their number and size.
#pragma once

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

/// One parameter's update. A row function changes elements [begin, end) of arrays that are
/// traversed alike: parameter, gradient, states, all of one element type.
struct Update {
  using Row = void (*)(const double* constants, void* const* arrays, int64_t begin, int64_t end);
  Row f32, f64;
  std::array<double, 8> constants;
};

class LOCKSTEP_API FusedOptimizer : public Optimizer {
 public:
  /// Strong guarantee: options, dtypes and memory for state are checked or allocated before
  /// anything is changed. Parameters that are not dense in memory are the exception: they are
  /// updated in a copy, which is written back last.
  void step() override;

 protected:
  using Optimizer::Optimizer;
  int states(int group) const override = 0;
  /// The next update of this parameter: its p.steps + 1-th.
  virtual Update update(int group, const Param& p) const = 0;

 private:
  struct Pass;
};

/// A FusedOptimizer with one Options per group.
template <class Options>
class LOCKSTEP_API GroupedOptimizer : public FusedOptimizer {
 public:
  /// The group's options, to be read or changed; step() throws ValueError for what makes no sense.
  /// For the rate beside schedules see set_lr(). IndexError: no such group.
  Options& options(int group = 0) {
    LOCKSTEP_CHECK(group >= 0 && group < groups(), IndexError, "options: there is no group ", group,
                   ", only ", groups());
    return options_[static_cast<size_t>(group)];
  }
  const Options& options(int group = 0) const {
    return const_cast<GroupedOptimizer*>(this)->options(group);
  }

 protected:
  explicit GroupedOptimizer(std::vector<ParamGroup<Options>> groups)
      : FusedOptimizer(tensors(groups)) {
    for (auto& g : groups) options_.push_back(g.options);
  }
  double& lr_of(int group) override { return options_[static_cast<size_t>(group)].lr; }

 private:
  static std::vector<std::vector<Tensor>> tensors(std::vector<ParamGroup<Options>>& groups) {
    std::vector<std::vector<Tensor>> all;
    for (auto& g : groups) all.push_back(std::move(g.params));
    return all;
  }

  std::vector<Options> options_;
};

}  // namespace lockstep::optim

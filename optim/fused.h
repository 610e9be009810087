// FusedOptimizer: an optimizer whose update is the same formula for every element. All parameters of a
// group are updated by one call of a kernel, in one pass over memory, whatever their number and size.
#pragma once

#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/update.h>

namespace lockstep::optim {

class LOCKSTEP_API FusedOptimizer : public Optimizer {
 public:
  /// Strong guarantee: options, dtypes and memory for state are checked or allocated before
  /// anything is changed. Parameters that are not dense in memory are the exception: they are
  /// updated in a copy, which is written back last.
  void step() override;

 protected:
  using Optimizer::Optimizer;
  int states(int group) const override = 0;
  /// Calls the kernel, with the options of the group.
  virtual void update(int group, const ParameterUpdates& updates) const = 0;
};

/// A FusedOptimizer with one Options per group, in memory that kernels read.
template <class Options>
class LOCKSTEP_API GroupedOptimizer : public FusedOptimizer {
 public:
  /// The group's options, to be read or changed; step() throws ValueError for what makes no sense.
  /// For the rate beside schedules see set_lr(). IndexError: no such group.
  Options& options(int group = 0) { return cell(group)->value; }
  const Options& options(int group = 0) const { return cell(group)->value; }

 protected:
  explicit GroupedOptimizer(std::vector<ParamGroup<Options>> groups)
      : FusedOptimizer(tensors(groups)) {
    for (auto& g : groups) options_.push_back(make_ref<Cell<Options>>(g.options));
  }
  const Ref<Cell<Options>>& cell(int group) const {
    LOCKSTEP_CHECK(group >= 0 && group < groups(), IndexError, "options: there is no group ", group,
                   ", only ", groups());
    return options_[static_cast<size_t>(group)];
  }
  double& lr_of(int group) override { return options(group).lr; }

 private:
  static std::vector<std::vector<Tensor>> tensors(std::vector<ParamGroup<Options>>& groups) {
    std::vector<std::vector<Tensor>> all;
    for (auto& g : groups) all.push_back(std::move(g.params));
    return all;
  }

  std::vector<Ref<Cell<Options>>> options_;
};

}  // namespace lockstep::optim

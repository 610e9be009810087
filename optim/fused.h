// FusedOptimizer: an optimizer whose update is the same formula for every element. All parameters
// are updated in one pass over memory: one parallel loop over fixed blocks of all tensors, whatever
// their number and size.
#pragma once

#include <memory>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

/// One parameter's update. A row function changes elements [begin, end) of arrays that are walked
/// alike: parameter, gradient, states, all of one element type.
struct Update {
  using Row = void (*)(const double* constants, void* const* arrays, int64_t begin, int64_t end);
  Row f32, f64;
  int states;  // how many state tensors it uses; they start as zeros
  std::array<double, 8> constants;
};

class LOCKSTEP_API FusedOptimizer : public Optimizer {
 public:
  ~FusedOptimizer() override;
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;
  void step() override;

 protected:
  explicit FusedOptimizer(std::vector<std::vector<Tensor>> groups);
  /// The update of a parameter of this group that is its `step`-th (from 1).
  virtual Update update(int group, int64_t step) const = 0;

 private:
  struct Pass;
  std::unique_ptr<Pass> pass_;  // its lists are reused from step to step
};

/// A FusedOptimizer with one Options per group.
template <class Options>
class LOCKSTEP_API GroupedOptimizer : public FusedOptimizer {
 public:
  const Options& options(int group = 0) const { return options_[static_cast<size_t>(group)]; }

 protected:
  explicit GroupedOptimizer(std::vector<ParamGroup<Options>> groups)
      : FusedOptimizer(tensors(groups)) {
    for (auto& g : groups) options_.push_back(g.options);
  }
  double& lr_of(int group) override { return options_[static_cast<size_t>(group)].lr; }
  std::vector<Options> options_;

 private:
  static std::vector<std::vector<Tensor>> tensors(std::vector<ParamGroup<Options>>& groups) {
    std::vector<std::vector<Tensor>> all;
    for (auto& g : groups) all.push_back(std::move(g.params));
    return all;
  }
};

}  // namespace lockstep::optim

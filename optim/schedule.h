// Learning rate schedules: PyTorch's names and closed forms. A schedule sets the rates of an
// optimizer's groups from their initial ones and the number of steps taken, which is its whole
// state.
//
//   optim::LinearLR warm_up{opt, {.start_factor = 0.01, .total_iters = 500}};
//   optim::CosineAnnealingLR decay{opt, {.T_max = 9500}};
//   optim::SequentialLR schedule{opt, {warm_up, decay}, {500}};   // one after the other
//   for (...) { ...; opt.step(); schedule.step(); }
//
// Step per batch or per epoch, as the numbers given mean. A rate is a function of the counts alone,
// so a resumed run needs nothing but load_state_dict, or set_steps(n).
//
// Several schedules of one optimizer compose: the initial rate of each is the rate that those made
// before it give, so that factors multiply, as in PyTorch.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

struct Schedule;

/// A schedule by its formula, rate(initial, steps). Construction sets the rate of step 0. Copies
/// are handles to one schedule. When the last handle is destroyed, the rates stay as they are, and
/// other schedules continue from them. The optimizer may be moved; after its destruction step() is
/// an Error.
class LOCKSTEP_API LRScheduler {
 public:
  using Formula = std::function<double(double initial, int64_t steps)>;
  LRScheduler(Optimizer& optimizer, Formula formula);

  void step() { set_steps(steps() + 1); }
  int64_t steps() const;
  /// What the formula throws leaves rates and count as they were; so does ValueError, for a
  /// negative count or rate.
  void set_steps(int64_t steps);
  /// The number of steps. Loading sets the rates as set_steps does, from the optimizer's initial
  /// ones; ValueError, and no change, for anything else.
  NamedTensors state_dict() const;
  void load_state_dict(const NamedTensors& state);
  /// The group's rate now.
  double lr(int group = 0) const;

 protected:
  LRScheduler(Optimizer& optimizer, const std::vector<LRScheduler>& parts, Formula formula);
  static const Formula& formula_of(const LRScheduler& schedule);

 private:
  std::shared_ptr<Schedule> schedule_;
};

/// initial * f(steps)
struct LOCKSTEP_API LambdaLR : LRScheduler {
  LambdaLR(Optimizer& optimizer, std::function<double(int64_t steps)> f);
};

struct StepLROptions {
  int64_t step_size;
  double gamma = 0.1;
};
/// initial * gamma^(steps / step_size), whole quotient.
struct LOCKSTEP_API StepLR : LRScheduler {
  StepLR(Optimizer& optimizer, StepLROptions options);
};

struct MultiStepLROptions {
  std::vector<int64_t> milestones;
  double gamma = 0.1;
};
/// initial * gamma^(milestones reached)
struct LOCKSTEP_API MultiStepLR : LRScheduler {
  MultiStepLR(Optimizer& optimizer, MultiStepLROptions options);
};

struct ExponentialLROptions {
  double gamma;
};
/// initial * gamma^steps
struct LOCKSTEP_API ExponentialLR : LRScheduler {
  ExponentialLR(Optimizer& optimizer, ExponentialLROptions options);
};

struct LinearLROptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1;
  int64_t total_iters = 5;
};
/// initial times a factor that goes from start_factor to end_factor over total_iters steps:
/// warm-up.
struct LOCKSTEP_API LinearLR : LRScheduler {
  LinearLR(Optimizer& optimizer, LinearLROptions options = {});
};

struct CosineAnnealingLROptions {
  int64_t T_max;
  double eta_min = 0;
};
/// eta_min + (initial - eta_min) (1 + cos(pi steps / T_max)) / 2. Loshchilov and Hutter, SGDR,
/// 2016.
struct LOCKSTEP_API CosineAnnealingLR : LRScheduler {
  CosineAnnealingLR(Optimizer& optimizer, CosineAnnealingLROptions options);
};

/// One schedule after the other: milestones[i] is the step at which schedule i + 1 begins, from its
/// own step 0. One milestone fewer than schedules, rising, else ValueError. The parts, schedules of
/// the same optimizer, no longer act by themselves: to step one is an Error.
struct LOCKSTEP_API SequentialLR : LRScheduler {
  SequentialLR(Optimizer& optimizer, const std::vector<LRScheduler>& schedules,
               std::vector<int64_t> milestones);
};

}  // namespace lockstep::optim

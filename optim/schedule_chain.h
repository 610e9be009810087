// ScheduleChain: the schedules of one optimizer and the rates that they work on. A group's rate is
// its base rate passed through the formulas of all schedules, in the order in which they were made.
// Internal to this folder.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

/// One schedule as its optimizer sees it.
struct Schedule {
  std::function<double(double initial, int64_t steps)> formula;
  std::shared_ptr<ScheduleChain> chain;
  int64_t steps = 0;
  bool in_sequence = false;  // the formula is part of a SequentialLR's

  ~Schedule();
};

class ScheduleChain {
 public:
  struct Rate {
    double base = std::numeric_limits<double>::quiet_NaN();  // none until a schedule asks
    double set = 0;  // the rate that the schedules last set; a different one was set by hand
  };

  ScheduleChain(Optimizer* owner, int groups)
      : optimizer(owner), rates(static_cast<size_t>(groups)) {}

  /// Adds the schedule and sets the rates. This and the functions below change nothing where a
  /// formula throws.
  void attach(Schedule& schedule);
  void set_steps(Schedule& schedule, int64_t steps);
  /// Removes the schedule; the others go on from the rates as they are now.
  void detach(Schedule& schedule) noexcept;
  /// Removes a schedule that becomes part of a SequentialLR; its factor goes too.
  void take_out(Schedule& schedule);
  /// The base rate, with regard to a rate that was set by hand since the schedules' last step.
  double base(int group) const;

  Optimizer* optimizer;     // null when it is gone
  std::vector<Rate> rates;  // by group

 private:
  double scheduled(double base) const;
  std::vector<double> bases() const;
  /// Sets the rates that follow from these base rates.
  void apply(const std::vector<double>& bases);

  std::vector<Schedule*> schedules_;
};

}  // namespace lockstep::optim

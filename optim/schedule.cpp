#include <lockstep/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <lockstep/optim/schedule_chain.h>
#include <lockstep/tensor/state_reader.h>

namespace lockstep::optim {

LRScheduler::LRScheduler(Optimizer& optimizer, Formula formula)
    : LRScheduler(optimizer, {}, std::move(formula)) {}

LRScheduler::LRScheduler(Optimizer& optimizer, const std::vector<LRScheduler>& parts,
                         Formula formula)
    : schedule_(std::make_shared<Schedule>()) {
  LOCKSTEP_CHECK(optimizer.schedules_, Error, "schedule: the optimizer has been moved from");
  schedule_->formula = std::move(formula);
  schedule_->chain = optimizer.schedules_;
  for (size_t i = 0; i < parts.size(); ++i)
    LOCKSTEP_CHECK(parts[i].schedule_->chain == schedule_->chain, ValueError,
                   "SequentialLR: schedule ", i, " is one of another optimizer");
  for (const LRScheduler& part : parts) {
    schedule_->chain->take_out(*part.schedule_);
    part.schedule_->in_sequence = true;
  }
  schedule_->chain->attach(*schedule_);
}

const LRScheduler::Formula& LRScheduler::formula_of(const LRScheduler& schedule) {
  return schedule.schedule_->formula;
}

int64_t LRScheduler::steps() const { return schedule_->steps; }

void LRScheduler::set_steps(int64_t steps) {
  LOCKSTEP_CHECK(steps >= 0, ValueError, "schedule: steps must not be negative, got ", steps);
  LOCKSTEP_CHECK(!schedule_->in_sequence, Error,
                 "schedule: it is part of a SequentialLR; step that one");
  LOCKSTEP_CHECK(schedule_->chain->optimizer, Error, "schedule: its optimizer is gone");
  schedule_->chain->set_steps(*schedule_, steps);
}

double LRScheduler::lr(int group) const {
  LOCKSTEP_CHECK(schedule_->chain->optimizer, Error, "schedule: its optimizer is gone");
  return schedule_->chain->optimizer->lr(group);
}

NamedTensors LRScheduler::state_dict() const { return {{"steps", integer_entry(steps())}}; }

void LRScheduler::load_state_dict(const NamedTensors& state) {
  StateReader in("schedule", state);
  const int64_t steps = in.integer("steps", 0);
  in.finish();
  set_steps(steps);
}

namespace {

LRScheduler::Formula scaled(std::function<double(int64_t)> f) {
  return [f = std::move(f)](double initial, int64_t steps) { return initial * f(steps); };
}
double power(double gamma, int64_t n) { return std::pow(gamma, static_cast<double>(n)); }

LRScheduler::Formula step_formula(StepLROptions o) {
  LOCKSTEP_CHECK(o.step_size > 0, ValueError, "StepLR: step_size must be positive, got ",
                 o.step_size);
  return scaled([o](int64_t steps) { return power(o.gamma, steps / o.step_size); });
}

LRScheduler::Formula multi_step_formula(MultiStepLROptions o) {
  std::sort(o.milestones.begin(), o.milestones.end());
  return scaled([o](int64_t steps) {
    return power(o.gamma, std::upper_bound(o.milestones.begin(), o.milestones.end(), steps) -
                              o.milestones.begin());
  });
}

LRScheduler::Formula linear_formula(LinearLROptions o) {
  LOCKSTEP_CHECK(o.start_factor > 0 && o.start_factor <= 1, ValueError,
                 "LinearLR: start_factor must lie in (0, 1], got ", o.start_factor);
  LOCKSTEP_CHECK(o.end_factor >= 0 && o.end_factor <= 1, ValueError,
                 "LinearLR: end_factor must lie in [0, 1], got ", o.end_factor);
  LOCKSTEP_CHECK(o.total_iters > 0, ValueError, "LinearLR: total_iters must be positive, got ",
                 o.total_iters);
  return scaled([o](int64_t steps) {
    const double part =
        static_cast<double>(std::min(steps, o.total_iters)) / static_cast<double>(o.total_iters);
    return o.start_factor + (o.end_factor - o.start_factor) * part;
  });
}

LRScheduler::Formula cosine_formula(CosineAnnealingLROptions o) {
  LOCKSTEP_CHECK(o.T_max > 0, ValueError, "CosineAnnealingLR: T_max must be positive, got ",
                 o.T_max);
  return [o](double initial, int64_t steps) {
    const double angle =
        std::numbers::pi * static_cast<double>(steps) / static_cast<double>(o.T_max);
    return o.eta_min + (initial - o.eta_min) * (1 + std::cos(angle)) / 2;
  };
}

LRScheduler::Formula sequential_formula(std::vector<LRScheduler::Formula> formulas,
                                        std::vector<int64_t> milestones) {
  LOCKSTEP_CHECK(milestones.size() + 1 == formulas.size(), ValueError,
                 "SequentialLR: ", formulas.size(), " schedules need one milestone fewer, got ",
                 milestones.size());
  for (size_t i = 0; i < milestones.size(); ++i)
    LOCKSTEP_CHECK(milestones[i] > (i ? milestones[i - 1] : 0), ValueError,
                   "SequentialLR: milestones must rise from above 0, got ", milestones[i],
                   " at position ", i);
  return [formulas, milestones](double initial, int64_t steps) {
    const auto i = static_cast<size_t>(
        std::upper_bound(milestones.begin(), milestones.end(), steps) - milestones.begin());
    return formulas[i](initial, steps - (i ? milestones[i - 1] : 0));
  };
}

}  // namespace

LambdaLR::LambdaLR(Optimizer& optimizer, std::function<double(int64_t)> f)
    : LRScheduler(optimizer, scaled(std::move(f))) {}
StepLR::StepLR(Optimizer& optimizer, StepLROptions o) : LRScheduler(optimizer, step_formula(o)) {}
MultiStepLR::MultiStepLR(Optimizer& optimizer, MultiStepLROptions o)
    : LRScheduler(optimizer, multi_step_formula(std::move(o))) {}
ExponentialLR::ExponentialLR(Optimizer& optimizer, ExponentialLROptions o)
    : LRScheduler(optimizer, scaled([o](int64_t steps) { return power(o.gamma, steps); })) {}
LinearLR::LinearLR(Optimizer& optimizer, LinearLROptions o)
    : LRScheduler(optimizer, linear_formula(o)) {}
CosineAnnealingLR::CosineAnnealingLR(Optimizer& optimizer, CosineAnnealingLROptions o)
    : LRScheduler(optimizer, cosine_formula(o)) {}
SequentialLR::SequentialLR(Optimizer& optimizer, const std::vector<LRScheduler>& schedules,
                           std::vector<int64_t> milestones)
    : LRScheduler(optimizer, schedules, [&] {
        std::vector<Formula> formulas;
        for (const LRScheduler& s : schedules) formulas.push_back(formula_of(s));
        return sequential_formula(std::move(formulas), std::move(milestones));
      }()) {}

}  // namespace lockstep::optim

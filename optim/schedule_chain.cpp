#include <lockstep/optim/schedule_chain.h>

#include <algorithm>
#include <cmath>

namespace lockstep::optim {

Schedule::~Schedule() {
  if (chain) chain->detach(*this);
}

double ScheduleChain::scheduled(double rate) const {
  for (const Schedule* s : schedules_) rate = s->formula(rate, s->steps);
  return rate;
}

double ScheduleChain::base(int group) const {
  const double now = optimizer->lr(group);
  const Rate& rate = rates[static_cast<size_t>(group)];
  if (std::isnan(rate.base)) return now;
  if (now == rate.set) return rate.base;
  // The formulas are affine in the rate (PyTorch's all are): scheduled(x) = offset + slope * x.
  const double at = rate.base != 0 ? rate.base : 1, offset = scheduled(0),
               slope = (scheduled(at) - offset) / at, base = (now - offset) / slope;
  const bool found = std::isfinite(base) && std::abs(scheduled(base) - now) <= 1e-9 * now;
  return found ? base : rate.base;
}

std::vector<double> ScheduleChain::bases() const {
  std::vector<double> all;
  for (int g = 0; g < static_cast<int>(rates.size()); ++g) all.push_back(base(g));
  return all;
}

void ScheduleChain::apply(const std::vector<double>& bases) {
  std::vector<Rate> next;
  for (const double base : bases) {
    next.push_back({base, scheduled(base)});
    detail::check_option(next.back().set >= 0, "schedule", "the rate must not be negative",
                         next.back().set);
  }
  rates = std::move(next);
  for (size_t g = 0; g < rates.size(); ++g) optimizer->lr_of(static_cast<int>(g)) = rates[g].set;
}

void ScheduleChain::attach(Schedule& schedule) {
  const std::vector<double> from = bases();
  schedules_.push_back(&schedule);
  try {
    apply(from);
  } catch (...) {
    schedules_.pop_back();
    throw;
  }
}

void ScheduleChain::set_steps(Schedule& schedule, int64_t steps) {
  const std::vector<double> from = bases();  // before the count changes
  const int64_t before = std::exchange(schedule.steps, steps);
  try {
    apply(from);
  } catch (...) {
    schedule.steps = before;
    throw;
  }
}

void ScheduleChain::detach(Schedule& schedule) noexcept {
  if (std::erase(schedules_, &schedule) == 0 || !optimizer) return;
  try {
    // Nothing was set by hand: the rates are merely reached by fewer schedules.
    for (Rate& rate : rates) rate.set = std::numeric_limits<double>::quiet_NaN();
    const std::vector<double> from = bases();
    for (size_t g = 0; g < rates.size(); ++g)
      rates[g] = {from[g], optimizer->lr(static_cast<int>(g))};
  } catch (...) {
    // A formula of the user's throws: the remaining schedules keep the bases they had.
  }
}

void ScheduleChain::take_out(Schedule& schedule) {
  const std::vector<double> from = bases();
  const auto at = std::find(schedules_.begin(), schedules_.end(), &schedule);
  if (at == schedules_.end()) return;
  const auto position = at - schedules_.begin();
  schedules_.erase(at);
  try {
    apply(from);
  } catch (...) {
    schedules_.insert(schedules_.begin() + position, &schedule);
    throw;
  }
}

}  // namespace lockstep::optim

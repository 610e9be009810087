#include <lockstep/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include <lockstep/optim/schedule_chain.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/state_reader.h>

namespace lockstep::optim {

Optimizer::Optimizer(std::vector<std::vector<Tensor>> groups)
    : groups_(static_cast<int>(groups.size())),
      schedules_(std::make_shared<ScheduleChain>(this, groups_)) {
  std::unordered_map<const void*, size_t> group_of;
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < groups[g].size(); ++i) {
      Tensor& t = groups[g][i];
      LOCKSTEP_CHECK(t.defined(), ValueError, "optimizer: parameter ", i, " of group ", g,
                     " is undefined");
      LOCKSTEP_CHECK(t.is_leaf(), ValueError, "optimizer: parameter ", i, " of group ", g,
                     ", of shape ", t.shape(), ", was made by ", t.node()->name(),
                     "; only leaves can be optimized, e.g. x.detach().requires_grad_()");
      const auto [first, fresh] = group_of.emplace(t.ref().get(), g);
      LOCKSTEP_CHECK(fresh, ValueError, "optimizer: parameter ", i, " of group ", g, ", of shape ",
                     t.shape(), ", is listed twice, first in group ", first->second);
      params_.push_back({std::move(t), static_cast<int>(g)});
    }
  LOCKSTEP_CHECK(!params_.empty(), ValueError, "optimizer: there are no parameters");
}

Optimizer::~Optimizer() {
  if (schedules_) schedules_->optimizer = nullptr;
}
Optimizer::Optimizer(Optimizer&& other) noexcept { *this = std::move(other); }
Optimizer& Optimizer::operator=(Optimizer&& other) noexcept {
  if (this == &other) return *this;
  if (schedules_) schedules_->optimizer = nullptr;
  params_ = std::exchange(other.params_, {});
  groups_ = std::exchange(other.groups_, 0);
  schedules_ = std::exchange(other.schedules_, nullptr);
  if (schedules_) schedules_->optimizer = this;
  return *this;
}

void Optimizer::zero_grad(bool set_to_none) {
  for (const Param& p : params_)
    if (const Ref<Leaf>& leaf = p.tensor.body().leaf) leaf->zero_grad(set_to_none);
}

std::vector<Tensor> Optimizer::params(int group) const {
  std::vector<Tensor> found;
  for (const Param& p : params_)
    if (p.group == group) found.push_back(p.tensor);
  return found;
}

// ---- learning rates ----

double Optimizer::lr(int group) const {
  LOCKSTEP_CHECK(group >= 0 && group < groups(), IndexError, "lr: there is no group ", group,
                 ", only ", groups());
  return const_cast<Optimizer*>(this)->lr_of(group);
}
void Optimizer::set_lr(int group, double lr) {
  LOCKSTEP_CHECK(group >= 0 && group < groups(), IndexError, "set_lr: there is no group ", group,
                 ", only ", groups());
  detail::check_option(lr >= 0, "set_lr", "lr must not be negative", lr);
  lr_of(group) = lr;
}
void Optimizer::set_lr(double lr) {
  for (int g = 0; g < groups(); ++g) set_lr(g, lr);
}
double Optimizer::initial_lr(int group) const {
  LOCKSTEP_CHECK(group >= 0 && group < groups(), IndexError, "initial_lr: there is no group ",
                 group, ", only ", groups());
  return schedules_->base(group);
}

void detail::check_option(bool ok, const char* optimizer, const char* rule, double value) {
  LOCKSTEP_CHECK(ok, ValueError, optimizer, ": ", rule, ", got ", value);
}

// ---- state ----

namespace {
Tensor number(double value) { return scalar(value, {.dtype = DType::f64}); }

template <class Params>
int64_t count_of(const Params& params, int group) {
  return std::count_if(params.begin(), params.end(), [&](auto& p) { return p.group == group; });
}
}  // namespace

NamedTensors Optimizer::state_dict() const {
  NamedTensors dict;
  const NoGradGuard guard;
  const auto names = state_names();
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& p = params_[i];
    if (p.steps() == 0) continue;
    const std::string prefix = str_cat("state.", i, ".");
    dict.emplace_back(prefix + "step", number(static_cast<double>(p.steps())));
    for (size_t s = 0; s < names.size(); ++s)
      if (p.state[s].defined()) dict.emplace_back(prefix + names[s], p.state[s].clone());
  }
  for (int g = 0; g < groups(); ++g) {
    const std::string prefix = str_cat("param_groups.", g, ".");
    dict.emplace_back(prefix + "params", integer_entry(count_of(params_, g)));
    const_cast<Optimizer*>(this)->visit_options(g, [&](const char* name, double& value) {
      dict.emplace_back(prefix + name, number(value));
    });
    if (!std::isnan(schedules_->rates[static_cast<size_t>(g)].base))
      dict.emplace_back(prefix + "initial_lr", number(initial_lr(g)));
  }
  return dict;
}

void Optimizer::load_state_dict(const NamedTensors& state) {
  LOCKSTEP_CHECK(schedules_, Error, "load_state_dict: the optimizer has been moved from");
  const NoGradGuard guard;
  Misfits misfits;
  std::map<std::string, Tensor> given;
  for (auto& [name, t] : state)
    if (!given.emplace(name, t).second) misfits.wrong.push_back(name + " (given twice)");
  const auto take = [&](const std::string& name) {
    const auto entry = given.extract(name);
    return entry.empty() ? Tensor() : entry.mapped();
  };
  const auto number_of = [&](const std::string& name, const Tensor& t) {
    if (t.numel() == 1 && !std::isnan(t.item<double>())) return t.item<double>();
    const std::string found = t.numel() == 1 ? "nan" : str_cat(t.dtype(), " ", t.shape());
    misfits.wrong.push_back(str_cat(name, " (must be one number, and is ", found, ")"));
    return 0.0;
  };

  // What there will be is gathered first, so that an error leaves the optimizer as it was.
  std::vector<double> options;
  std::vector<ScheduleChain::Rate> rates(static_cast<size_t>(groups()));
  for (int g = 0; g < groups(); ++g) {
    const std::string prefix = str_cat("param_groups.", g, ".");
    // Parameters that have not been updated have no state, so the entries alone do not tell how many
    // there were, and which one each belongs to.
    const std::string count = prefix + "params";
    if (const Tensor t = take(count); t.defined()) {
      const double there = number_of(count, t);
      const int64_t here = count_of(params_, g);
      if (there != static_cast<double>(here))
        misfits.wrong.push_back(str_cat(count, " (given ", there, ", here ", here, ")"));
    } else {
      misfits.missing.push_back(count);
    }
    visit_options(g, [&](const char* option, double& value) {
      const std::string name = prefix + option;
      const Tensor t = take(name);
      if (!t.defined()) misfits.missing.push_back(name);
      options.push_back(t.defined() ? number_of(name, t) : value);
    });
    const std::string name = prefix + "initial_lr";
    if (const Tensor t = take(name); t.defined()) {
      const double base = number_of(name, t);
      if (base < 0) misfits.wrong.push_back(str_cat(name, " (must not be negative, and is ", base, ")"));
      rates[static_cast<size_t>(g)].base = base;
    }
  }
  const auto exchange_options = [&] {
    size_t next = 0;
    for (int g = 0; g < groups(); ++g)
      visit_options(g, [&](const char*, double& value) { std::swap(value, options[next++]); });
  };
  std::vector<size_t> needed;  // state tensors by group, under the new options
  exchange_options();
  try {
    for (int g = 0; g < groups(); ++g) {
      needed.push_back(static_cast<size_t>(states(g)));
      try {
        check_options(g);
      } catch (const ValueError& e) {
        misfits.wrong.push_back(str_cat("param_groups.", g, " (", e.what(), ")"));
      }
    }
  } catch (...) {
    exchange_options();
    throw;
  }
  exchange_options();

  const auto names = state_names();
  std::vector<Param> params = params_;
  for (size_t i = 0; i < params.size(); ++i) {
    Param& p = params[i];
    const std::string prefix = str_cat("state.", i, ".");
    const Tensor step = take(prefix + "step");
    const double steps = step.defined() ? number_of(prefix + "step", step) : 0;
    p.count = make_ref<Cell<UpdateCount>>();
    if (!(steps >= 0 && steps <= 0x1p53 && steps == std::floor(steps)))
      misfits.wrong.push_back(str_cat(prefix, "step (not a count: ", steps, ")"));
    else
      p.count->value.steps = static_cast<int64_t>(steps);
    for (size_t s = 0; s < names.size(); ++s) {
      const std::string name = prefix + names[s];
      const Tensor t = take(name);
      p.state[s] = Tensor();
      if (!t.defined()) {
        if (p.steps() > 0 && s < needed[static_cast<size_t>(p.group)])
          misfits.missing.push_back(name);
      } else if (t.shape() != p.tensor.shape()) {
        misfits.misshapen.push_back(
            str_cat(name, " (given ", t.shape(), ", here ", p.tensor.shape(), ")"));
      } else if (!t.is_floating_point()) {
        misfits.wrong.push_back(str_cat(name, " (given ", t.dtype(), ", must be floating)"));
      } else {
        p.state[s] = t.detach().to(p.tensor.dtype()).to(p.tensor.device()).clone();
        if (!step.defined()) misfits.missing.push_back(prefix + "step");
      }
    }
    p.count->value.fresh = !p.state[0].defined();
  }
  for (auto& [name, t] : given) misfits.unexpected.push_back(name);
  LOCKSTEP_CHECK(misfits.names_fit() && misfits.values_fit(), ValueError,
                 "load_state_dict: the state given does not fit this optimizer of ", params_.size(),
                 " parameters in ", groups(), " groups", misfits.text());
  exchange_options();
  params_ = std::move(params);
  for (int g = 0; g < groups(); ++g) rates[static_cast<size_t>(g)].set = lr(g);
  schedules_->rates = std::move(rates);
}

}  // namespace lockstep::optim

#include <lockstep/optim/optimizer.h>

#include <cmath>
#include <limits>
#include <map>
#include <unordered_set>

#include <lockstep/tensor/node.h>

namespace lockstep::optim {

Optimizer::Optimizer(std::vector<std::vector<Tensor>> groups)
    : initial_lr_(groups.size(), std::numeric_limits<double>::quiet_NaN()) {
  std::unordered_set<const void*> seen;
  for (size_t g = 0; g < groups.size(); ++g) {
    LOCKSTEP_CHECK(!groups[g].empty(), ValueError, "optimizer: group ", g, " has no parameters");
    for (Tensor& t : groups[g]) {
      LOCKSTEP_CHECK(t.is_leaf(), ValueError, "optimizer: a parameter of shape ", t.shape(),
                     " was made by ", t.node()->name(),
                     "; only leaves can be optimized, e.g. x.detach().requires_grad_()");
      LOCKSTEP_CHECK(seen.insert(t.ref().get()).second, ValueError, "optimizer: parameter ",
                     params_.size(), " of shape ", t.shape(), " is listed twice");
      params_.push_back({std::move(t), static_cast<int>(g), 0, {}});
    }
  }
  LOCKSTEP_CHECK(!params_.empty(), ValueError, "optimizer: there are no parameters");
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
double Optimizer::initial_lr(int group) {
  double& initial = initial_lr_[static_cast<size_t>(group)];
  if (std::isnan(initial)) initial = lr(group);
  return initial;
}

void detail::check_option(bool ok, const char* optimizer, const char* rule, double value) {
  LOCKSTEP_CHECK(ok, ValueError, optimizer, ": ", rule, ", got ", value);
}

// ---- state ----

namespace {
Tensor number(double value) { return scalar(value, {.dtype = DType::f64}); }

// A number of a state that may come from a file.
double number_of(const Tensor& t, const std::string& name) {
  LOCKSTEP_CHECK(t.numel() == 1, ValueError, "load_state_dict: ", name,
                 " must be one number, and has shape ", t.shape());
  return t.item<double>();
}
}  // namespace

NamedTensors Optimizer::state_dict() const {
  NamedTensors dict;
  const NoGradGuard guard;
  const auto names = state_names();
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& p = params_[i];
    if (p.steps == 0) continue;
    const std::string prefix = str_cat("state.", i, ".");
    dict.emplace_back(prefix + "step", number(static_cast<double>(p.steps)));
    for (size_t s = 0; s < names.size(); ++s)
      if (p.state[s].defined()) dict.emplace_back(prefix + names[s], p.state[s].clone());
  }
  for (int g = 0; g < groups(); ++g) {
    const std::string prefix = str_cat("param_groups.", g, ".");
    const_cast<Optimizer*>(this)->visit_options(g, [&](const char* name, double& value) {
      dict.emplace_back(prefix + name, number(value));
    });
    if (const double initial = initial_lr_[static_cast<size_t>(g)]; !std::isnan(initial))
      dict.emplace_back(prefix + "initial_lr", number(initial));
  }
  return dict;
}

void Optimizer::load_state_dict(const NamedTensors& state) {
  const NoGradGuard guard;
  std::map<std::string, Tensor> rest(state.begin(), state.end());
  auto take = [&](const std::string& name) {
    const auto found = rest.find(name);
    if (found == rest.end()) return Tensor();
    const Tensor t = found->second;
    rest.erase(found);
    return t;
  };
  const auto names = state_names();
  // What there will be is gathered first, so that an error leaves the optimizer as it was.
  std::vector<Param> params = params_;
  for (size_t i = 0; i < params.size(); ++i) {
    Param& p = params[i];
    const std::string prefix = str_cat("state.", i, ".");
    const Tensor step = take(prefix + "step");
    const double steps = step.defined() ? number_of(step, prefix + "step") : 0;
    LOCKSTEP_CHECK(steps >= 0 && steps <= 0x1p53 && steps == std::floor(steps), ValueError,
                   "load_state_dict: ", prefix, "step must be a count, and is ", steps);
    p.steps = static_cast<int64_t>(steps);
    for (size_t s = 0; s < names.size(); ++s) {
      const Tensor t = take(prefix + names[s]);
      LOCKSTEP_CHECK(!t.defined() || t.shape() == p.tensor.shape(), ValueError,
                     "load_state_dict: ", prefix, names[s], " has shape ", t.shape(),
                     ", parameter ", i, " ", p.tensor.shape());
      p.state[s] =
          t.defined() ? t.detach().to(p.tensor.dtype()).to(p.tensor.device()).clone() : Tensor();
    }
  }
  std::vector<double> options, initial;
  for (int g = 0; g < groups(); ++g) {
    const std::string prefix = str_cat("param_groups.", g, ".");
    visit_options(g, [&](const char* name, double&) {
      const Tensor t = take(prefix + name);
      LOCKSTEP_CHECK(t.defined(), ValueError, "load_state_dict: ", prefix, name, " is missing");
      options.push_back(number_of(t, prefix + name));
    });
    const Tensor t = take(prefix + "initial_lr");
    initial.push_back(t.defined() ? number_of(t, prefix + "initial_lr")
                                  : std::numeric_limits<double>::quiet_NaN());
  }
  LOCKSTEP_CHECK(rest.empty(), ValueError, "load_state_dict: ", rest.begin()->first, " and ",
                 rest.size() - 1, " more belong to nothing here; this optimizer has ",
                 params_.size(), " parameters in ", groups(), " groups");
  size_t next = 0;
  for (int g = 0; g < groups(); ++g)
    visit_options(g, [&](const char*, double& value) { value = options[next++]; });
  params_ = std::move(params);
  initial_lr_ = std::move(initial);
}

}  // namespace lockstep::optim

#include <lockstep/optim/adam.h>

namespace lockstep::optim {

template <bool decoupled>
AdamBase<decoupled>::AdamBase(std::vector<ParamGroup<Options>> groups)
    : GroupedOptimizer<Options>(std::move(groups)) {
  for (int g = 0; g < this->groups(); ++g) check_options(g);
}

template <bool decoupled>
void AdamBase<decoupled>::check_options(int group) const {
  constexpr const char* name = decoupled ? "AdamW" : "Adam";
  const Options& o = this->options(group);
  detail::check_option(o.lr >= 0, name, "lr must not be negative", o.lr);
  detail::check_option(o.eps >= 0, name, "eps must not be negative", o.eps);
  detail::check_option(o.weight_decay >= 0, name, "weight_decay must not be negative",
                       o.weight_decay);
  for (double beta : o.betas)
    detail::check_option(beta >= 0 && beta < 1, name, "betas must lie in [0, 1)", beta);
}

template <bool decoupled>
void AdamBase<decoupled>::update(int group, const ParameterUpdates& updates) const {
  if constexpr (decoupled)
    kernels::adamw(updates, this->cell(group));
  else
    kernels::adam(updates, this->cell(group));
}

template <bool decoupled>
void AdamBase<decoupled>::visit_options(int group, const Optimizer::OptionVisitor& visit) {
  Options& o = this->options(group);
  visit("lr", o.lr);
  visit("beta1", o.betas[0]);
  visit("beta2", o.betas[1]);
  visit("eps", o.eps);
  visit("weight_decay", o.weight_decay);
  double amsgrad = o.amsgrad;
  visit("amsgrad", amsgrad);
  o.amsgrad = amsgrad != 0;
}

template class AdamBase<false>;
template class AdamBase<true>;

}  // namespace lockstep::optim

namespace lockstep::kernels {
constinit Kernel<void(const optim::ParameterUpdates&, const Ref<Cell<optim::AdamOptions>>&)> adam(
    "Adam", " step");
constinit Kernel<void(const optim::ParameterUpdates&, const Ref<Cell<optim::AdamWOptions>>&)> adamw(
    "AdamW", " step");
}  // namespace lockstep::kernels

#include <lockstep/optim/adam.h>

#include <cmath>

#include <lockstep/optim/kernels.h>

namespace lockstep::optim {
namespace {
template <class Options>
constexpr bool decoupled = std::is_same_v<Options, AdamWOptions>;
template <class Options>
constexpr const char* name = decoupled<Options> ? "AdamW" : "Adam";
}  // namespace

template <class Options>
AdamBase<Options>::AdamBase(std::vector<ParamGroup<Options>> groups)
    : GroupedOptimizer<Options>(std::move(groups)) {
  for (const Options& o : this->options_) {
    detail::check_option(o.lr >= 0, name<Options>, "lr must not be negative", o.lr);
    detail::check_option(o.eps >= 0, name<Options>, "eps must not be negative", o.eps);
    detail::check_option(o.weight_decay >= 0, name<Options>, "weight_decay must not be negative",
                         o.weight_decay);
    for (double beta : o.betas)
      detail::check_option(beta >= 0 && beta < 1, name<Options>, "betas must lie in [0, 1)", beta);
  }
}

template <class Options>
Update AdamBase<Options>::update(int group, int64_t step) const {
  const Options& o = this->options(group);
  const auto t = static_cast<double>(step);
  const double correction1 = 1 - std::pow(o.betas[0], t), correction2 = 1 - std::pow(o.betas[1], t);
  const kernels::Rows rows = o.amsgrad ? kernels::table().adam_amsgrad : kernels::table().adam;
  return {rows.f32,
          rows.f64,
          o.amsgrad ? 3 : 2,
          {o.lr / correction1, 1 / std::sqrt(correction2), o.betas[0], o.betas[1], o.eps,
           decoupled<Options> ? 0 : o.weight_decay,
           decoupled<Options> ? 1 - o.lr * o.weight_decay : 1}};
}

template <class Options>
void AdamBase<Options>::visit_options(int group, const Optimizer::OptionVisitor& visit) {
  Options& o = this->options_[static_cast<size_t>(group)];
  visit("lr", o.lr);
  visit("beta1", o.betas[0]);
  visit("beta2", o.betas[1]);
  visit("eps", o.eps);
  visit("weight_decay", o.weight_decay);
  double amsgrad = o.amsgrad;
  visit("amsgrad", amsgrad);
  o.amsgrad = amsgrad != 0;
}

template class AdamBase<AdamOptions>;
template class AdamBase<AdamWOptions>;

}  // namespace lockstep::optim

#include <lockstep/optim/sgd.h>

namespace lockstep::optim {

SGD::SGD(std::vector<ParamGroup<SGDOptions>> all) : GroupedOptimizer(std::move(all)) {
  for (int g = 0; g < groups(); ++g) check_options(g);
}
SGD::SGD(std::vector<Tensor> params, SGDOptions options) : SGD({{std::move(params), options}}) {}

void SGD::check_options(int group) const {
  const SGDOptions& o = options(group);
  detail::check_option(o.lr >= 0, "SGD", "lr must not be negative", o.lr);
  detail::check_option(o.momentum >= 0, "SGD", "momentum must not be negative", o.momentum);
  detail::check_option(o.weight_decay >= 0, "SGD", "weight_decay must not be negative",
                       o.weight_decay);
  detail::check_option(!o.nesterov || o.momentum > 0, "SGD", "nesterov needs momentum", o.momentum);
  detail::check_option(!o.nesterov || o.dampening == 0, "SGD", "nesterov needs dampening 0",
                       o.dampening);
}

void SGD::update(int group, const ParameterUpdates& updates) const {
  kernels::sgd(updates, cell(group));
}

void SGD::visit_options(int group, const OptionVisitor& visit) {
  SGDOptions& o = options(group);
  visit("lr", o.lr);
  visit("momentum", o.momentum);
  visit("dampening", o.dampening);
  visit("weight_decay", o.weight_decay);
  double nesterov = o.nesterov;
  visit("nesterov", nesterov);
  o.nesterov = nesterov != 0;
}

}  // namespace lockstep::optim

namespace lockstep {
constinit Kernel<void(const optim::ParameterUpdates&, const Ref<Cell<optim::SGDOptions>>&)>
    kernels::sgd("SGD", " step");
}  // namespace lockstep

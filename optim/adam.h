// Adam and AdamW, PyTorch's formulas. Sources: Kingma and Ba, 2014; Loshchilov and Hutter,
// "Decoupled weight decay regularization", 2017; amsgrad: Reddi et al., 2018.
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
//   p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
#pragma once

#include <lockstep/optim/fused.h>

namespace lockstep::optim {

template <bool decoupled>
struct AdamBaseOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  /// Adam: weight_decay * p is added to g. AdamW: p is first multiplied by 1 - lr * weight_decay.
  double weight_decay = decoupled ? 1e-2 : 0;
  bool amsgrad = false;  // divide by the largest v so far
};
using AdamOptions = AdamBaseOptions<false>;
using AdamWOptions = AdamBaseOptions<true>;

/// The common base: they differ in where the weight decay is applied.
template <bool decoupled>
class LOCKSTEP_API AdamBase : public GroupedOptimizer<AdamBaseOptions<decoupled>> {
 public:
  using Options = AdamBaseOptions<decoupled>;
  explicit AdamBase(std::vector<ParamGroup<Options>> groups);
  AdamBase(std::vector<Tensor> params, Options options)
      : AdamBase({{std::move(params), options}}) {}

 protected:
  void update(int group, const ParameterUpdates& updates) const override;
  int states(int group) const override { return this->options(group).amsgrad ? 3 : 2; }
  std::vector<std::string> state_names() const override {
    return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  }
  void check_options(int group) const override;
  void visit_options(int group, const Optimizer::OptionVisitor& visit) override;
};
extern template class AdamBase<false>;
extern template class AdamBase<true>;

struct Adam final : AdamBase<false> {
  using AdamBase::AdamBase;
};
struct AdamW final : AdamBase<true> {
  using AdamBase::AdamBase;
};

}  // namespace lockstep::optim

namespace lockstep::kernels {
// States m and v, and with amsgrad the largest v so far.
LOCKSTEP_API extern Kernel<void(const optim::ParameterUpdates& updates,
                                const Ref<Cell<optim::AdamOptions>>& options)>
    adam;
LOCKSTEP_API extern Kernel<void(const optim::ParameterUpdates& updates,
                                const Ref<Cell<optim::AdamWOptions>>& options)>
    adamw;
}  // namespace lockstep::kernels

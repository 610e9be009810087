// Adam and AdamW, PyTorch's formulas. Sources: Kingma and Ba, 2014; Loshchilov and Hutter,
// "Decoupled weight decay regularization", 2017; amsgrad: Reddi et al., 2018.
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
//   p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
#pragma once

#include <lockstep/optim/fused.h>

namespace lockstep::optim {

struct LOCKSTEP_API AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;  // Adam: weight_decay * p is added to g
  bool amsgrad = false;     // divide by the largest v so far
};
struct LOCKSTEP_API AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  // AdamW: p is first multiplied by 1 - lr * weight_decay
  bool amsgrad = false;
};

/// What both are: they differ in where the weight decay goes.
template <class Options>
class LOCKSTEP_API AdamBase : public GroupedOptimizer<Options> {
 public:
  explicit AdamBase(std::vector<ParamGroup<Options>> groups);
  AdamBase(std::vector<Tensor> params, Options options)
      : AdamBase({{std::move(params), options}}) {}

 protected:
  Update update(int group, int64_t step) const override;
  std::vector<std::string> state_names() const override {
    return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  }
  void visit_options(int group, const Optimizer::OptionVisitor& visit) override;
};
extern template class AdamBase<AdamOptions>;
extern template class AdamBase<AdamWOptions>;

struct Adam final : AdamBase<AdamOptions> {
  using AdamBase::AdamBase;
};
struct AdamW final : AdamBase<AdamWOptions> {
  using AdamBase::AdamBase;
};

}  // namespace lockstep::optim

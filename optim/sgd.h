// SGD: stochastic gradient descent with momentum, PyTorch's formula:
//   g += weight_decay * p;  buf = momentum * buf + (1 - dampening) * g  (buf = g at first);
//   p -= lr * (nesterov ? g + momentum * buf : buf)
#pragma once

#include <lockstep/optim/fused.h>

namespace lockstep::optim {

struct LOCKSTEP_API SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  // needs momentum, and no dampening
};

class LOCKSTEP_API SGD final : public GroupedOptimizer<SGDOptions> {
 public:
  explicit SGD(std::vector<ParamGroup<SGDOptions>> groups);
  SGD(std::vector<Tensor> params, SGDOptions options);

 protected:
  void update(int group, const ParameterUpdates& updates) const override;
  int states(int group) const override { return options(group).momentum != 0; }
  std::vector<std::string> state_names() const override { return {"momentum_buffer"}; }
  void check_options(int group) const override;
  void visit_options(int group, const OptionVisitor& visit) override;
};

}  // namespace lockstep::optim

namespace lockstep::kernels {
LOCKSTEP_API extern Kernel<void(const optim::ParameterUpdates& updates,
                                const Ref<Cell<optim::SGDOptions>>& options)>
    sgd;
}  // namespace lockstep::kernels

// The kernels of the optimizers and of gradient clipping, each over a list of tensors at once. What changes
// from step to step, options and counts, they read from memory.
#pragma once

#include <array>
#include <vector>

#include <lockstep/tensor/kernel.h>

namespace lockstep::optim {

/// How often a parameter was updated.
struct UpdateCount {
  int64_t steps = 0;
  bool fresh = true;  // no update has written its state yet
};

/// The parameters that one call of an optimizer's kernel updates.
struct ParameterUpdates {
  static constexpr int kMaxState = 3;
  struct Update {
    Tensor parameter, gradient;           // dense, of one dtype and memory order, as the states are
    std::array<Tensor, kMaxState> state;  // the first ones are defined, as many as the optimizer has
    Ref<Cell<UpdateCount>> count;         // the kernel counts this update
  };
  std::vector<Update> list;

  template <class F>
  void each_tensor(const F& f) const {
    for (const Update& u : list) f(u.parameter), f(u.gradient);
  }
};

}  // namespace lockstep::optim

namespace lockstep::kernels {
/// norm [2], f64: the p-norm of all gradients (dense) seen as one vector, as a product of two factors, since
/// it may be beyond the range of f64. Powers neither overflow nor vanish.
LOCKSTEP_API extern Kernel<void(const Tensor& norm, const std::vector<Tensor>& gradients, double p)>
    grad_norm;
/// Gradients (dense) times max_norm / (norm + 1e-6) if that is below 1 or NaN.
LOCKSTEP_API extern Kernel<void(const std::vector<Tensor>& gradients, const Tensor& norm,
                                double max_norm)>
    clip_grad_norm;
}  // namespace lockstep::kernels

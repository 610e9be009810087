// The element-wise formulas of the optimizers and of gradient clipping, vectorised for the
// processor at hand. Internal to this folder.
#pragma once

#include <lockstep/optim/fused.h>

namespace lockstep::optim::kernels {

struct Rows {
  Update::Row f32, f64;
};
struct Table {
  /// Constants lr, weight decay, momentum, gradient's share (1 - dampening, or 1 at first). Arrays
  /// p, g and, with momentum, its buffer.
  Rows sgd, sgd_momentum, sgd_nesterov;
  /// Constants step size (lr / bias correction 1), 1 / sqrt(bias correction 2), beta1, beta2, eps,
  /// L2 weight decay, factor on p (1 - lr * decoupled decay). Arrays p, g, exp_avg, exp_avg_sq and,
  /// with amsgrad, max_exp_avg_sq.
  Rows adam, adam_amsgrad;
  /// Constants factor. Array g.
  Rows scale;
};
/// That of the best instruction set this processor has.
const Table& table();

}  // namespace lockstep::optim::kernels

// The element-wise formulas of the optimizers and of gradient clipping, vectorised for the processor at
// hand, and the loop that runs them over many tensors.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::optim::cpu {

/// Changes elements [begin, end) of arrays that are traversed alike, all of one element type.
using Row = void (*)(const double* constants, void* const* arrays, int64_t begin, int64_t end);
struct Rows {
  Row f32, f64;
  Row of(DType t) const { return t == DType::f32 ? f32 : f64; }
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

/// A row function over all elements of some arrays.
struct Pass {
  struct Task {
    Row row;
    std::array<double, 8> constants;
    std::array<void*, 5> arrays;
    int64_t begin, end;  // its place in the traversal of all tensors
  };
  std::vector<Task> tasks;

  void add(Row row, const std::array<double, 8>& constants, const std::array<void*, 5>& arrays,
           int64_t count);
  /// One parallel loop over fixed blocks of all tasks, whatever their number and size.
  void run() const;

 private:
  int64_t elements_ = 0;
};

}  // namespace lockstep::optim::cpu

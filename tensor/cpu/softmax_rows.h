// The rows behind softmax, log_softmax and cross_entropy on the CPU: one table of functions per
// element type, of the best instruction set that the processor has.
#pragma once

#include <cstdint>

namespace lockstep::cpu {

/// Every row has n >= 1 elements without gaps. y and dx may be the input itself.
template <class T>
struct SoftmaxRows {
  void (*softmax)(const T* x, T* y, int64_t n);
  void (*log_softmax)(const T* x, T* y, int64_t n);
  /// dx = y (dy - sum(y dy))
  void (*softmax_backward)(const T* y, const T* dy, T* dx, int64_t n);
  /// dx = dy - exp(y) sum(dy)
  void (*log_softmax_backward)(const T* y, const T* dy, T* dx, int64_t n);
  /// max = the row's maximum, log_sum = log(sum(exp(x - max))); log-sum-exp is their sum.
  void (*log_sum_exp)(const T* x, int64_t n, T* max, T* log_sum);
  /// dx = (exp(x - max - log_sum) - base) * scale: softmax minus an even part of the target.
  void (*scaled_softmax)(const T* x, T max, T log_sum, T base, T scale, T* dx, int64_t n);
};

template <class T>
const SoftmaxRows<T>& softmax_rows();

}  // namespace lockstep::cpu

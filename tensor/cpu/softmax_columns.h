// softmax, log_softmax and cross_entropy down columns on the CPU: what softmax_rows.h does along rows,
// for a dimension that is not the last one.
#pragma once

#include <cstdint>

namespace lockstep::cpu {

/// At most so many columns at a time.
constexpr int64_t kSoftmaxColumns = 256;

/// Columns of n >= 1 elements, `stride` apart, that lie side by side; all operands alike. y and dx may
/// be the input itself. max, log_sum and scale have one number for each column.
template <class T>
struct SoftmaxColumns {
  void (*softmax)(const T* x, T* y, int64_t stride, int64_t n, int64_t columns);
  void (*log_softmax)(const T* x, T* y, int64_t stride, int64_t n, int64_t columns);
  void (*softmax_backward)(const T* y, const T* dy, T* dx, int64_t stride, int64_t n,
                           int64_t columns);
  void (*log_softmax_backward)(const T* y, const T* dy, T* dx, int64_t stride, int64_t n,
                               int64_t columns);
  void (*log_sum_exp)(const T* x, int64_t stride, int64_t n, int64_t columns, T* max, T* log_sum);
  void (*scaled_softmax)(const T* x, int64_t stride, int64_t n, int64_t columns, const T* max,
                         const T* log_sum, T base, const T* scale, T* dx);
};

template <class T>
const SoftmaxColumns<T>& softmax_columns();

}  // namespace lockstep::cpu

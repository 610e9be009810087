// The rows behind layer_norm and batch_norm on the CPU, in f32 and f64, for every instruction set.
#pragma once

#include <cstdint>

namespace lockstep::cpu {

/// Rows of n elements without gaps. Pointers said to be optional may be null.
template <class T>
struct NormRows {
  /// statistics = {mean, what rounding took from it, sqrt(variance + eps)};
  /// y = (x - mean) / sqrt(variance + eps) * weight + bias, both optional.
  void (*layer_norm)(const T* x, const T* weight, const T* bias, double eps, T* y, T* statistics,
                     int64_t n);
  /// dx (optional) of one row; dweight and dbias (optional) grow by the row's share.
  void (*layer_norm_backward)(const T* dy, const T* x, const T* weight, const T* statistics, T* dx,
                              T* dweight, T* dbias, int64_t n);

  /// y = (x - mean) scale + shift, each a number per element or, for a plane of one channel, the
  /// same one.
  void (*affine_row)(const T* x, const T* mean, const T* scale, const T* shift, T* y, int64_t n);
  void (*affine_plane)(const T* x, T mean, T scale, T shift, T* y, int64_t n);
  /// dx = scale (dy - a - (x - mean) b)
  void (*affine_backward_row)(const T* dy, const T* x, const T* mean, const T* scale, const T* a,
                              const T* b, T* dx, int64_t n);
  void (*affine_backward_plane)(const T* dy, const T* x, T mean, T scale, T a, T b, T* dx,
                                int64_t n);
};

template <class T>
const NormRows<T>& norm_rows();

}  // namespace lockstep::cpu

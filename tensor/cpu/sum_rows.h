// Sums along and across rows without gaps, in f32 and f64, for every instruction set: what
// reductions and batch norm are made of.
#pragma once

#include <cstdint>

namespace lockstep::cpu {

/// Rows have n elements without gaps; row r of a block begins at x + r * stride.
template <class T>
struct SumRows {
  double (*sum)(const T* x, int64_t n);
  /// The sum of (x - centre)^2.
  double (*squares)(const T* x, T centre, int64_t n);
  /// The sum of a (x - centre).
  double (*products)(const T* a, const T* x, T centre, int64_t n);
  /// sums[j] += x[j], over all rows; in T, so call it for at most some hundred rows.
  void (*add)(const T* x, int64_t stride, int64_t rows, int64_t n, T* sums);
  /// sums[j] += (x[j] - centre[j])^2, over all rows.
  void (*add_squares)(const T* x, int64_t stride, int64_t rows, int64_t n, const T* centre,
                      T* sums);
  /// sums[j] += a[j], products[j] += a[j] (x[j] - centre[j]), over all rows of a and x.
  void (*add_products)(const T* a, const T* x, int64_t stride, int64_t rows, int64_t n,
                       const T* centre, T* sums, T* products);
};

template <class T>
const SumRows<T>& sum_rows();

}  // namespace lockstep::cpu

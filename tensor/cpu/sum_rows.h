// Sums along and across rows without gaps, in f32 and f64, for every instruction set: what
// reductions, batch norm and layer norm are made of. Short runs are summed in T and their results
// in Wide<T>; where a run leaves T's range, it is summed in Wide<T> throughout.
#pragma once

#include <lockstep/tensor/cpu/moments.h>

namespace lockstep::cpu {

/// Rows have n elements without gaps; row r of a block begins at x + r * stride.
template <class T>
struct SumRows {
  Wide<T> (*sum)(const T* x, int64_t n);
  /// The sum of a (x - centre).
  Wide<T> (*products)(const T* a, const T* x, T centre, int64_t n);
  /// n >= 1.
  Moments<T> (*moments)(const T* x, int64_t n);
  /// moments[j] are combined with those of x[j] over all rows.
  void (*add_moments)(const T* x, int64_t stride, int64_t rows, int64_t n, Moments<T>* moments);
  /// sums[j] += a[j], products[j] += a[j] (x[j] - centre[j]), over all rows of a and x.
  void (*add_products)(const T* a, const T* x, int64_t stride, int64_t rows, int64_t n,
                       const T* centre, Wide<T>* sums, Wide<T>* products);
};

template <class T>
const SumRows<T>& sum_rows();

}  // namespace lockstep::cpu

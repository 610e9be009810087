// The rows behind the reductions that are formulas, in f32 and f64, for every instruction set.
#pragma once

#include <tuple>

#include <lockstep/tensor/cpu/moments.h>
#include <lockstep/tensor/ops/reduction_traits.h>

namespace lockstep::cpu {

/// What elements of T are combined in.
template <class R, class T>
using TotalOf = std::conditional_t<R::additive, Wide<T>, T>;

/// Rows of n elements without gaps; row r of a block begins at x + r * stride.
template <class R, class T>
struct ReduceRows {
  /// total = the combination of total with all elements' map.
  void (*row)(const T* x, int64_t n, TotalOf<R, T>& total);
  /// totals[j] likewise with those of column j.
  void (*columns)(const T* x, int64_t stride, int64_t rows, int64_t n, TotalOf<R, T>* totals);
};
template <class T, class L>
struct ReduceTableOf;
template <class T, class... R>
struct ReduceTableOf<T, List<R...>> {
  using type = std::tuple<ReduceRows<R, T>...>;
};
template <class T>
using ReduceTable = typename ReduceTableOf<T, reductions::Reductions>::type;

template <class T>
const ReduceTable<T>& reduce_table();
template <class R, class T>
const ReduceRows<R, T>& reduce_rows() {
  return std::get<ReduceRows<R, T>>(reduce_table<T>());
}

}  // namespace lockstep::cpu

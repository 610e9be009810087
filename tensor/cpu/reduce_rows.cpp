// Sums run in T over short runs and meet in Wide<T>; a run that leaves the range of T is taken again in
// Wide<T>, element by element. Other totals are packs of T.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/reduce_rows.cpp>
#include <hwy/foreach_target.h>

#include <bit>

#include <lockstep/tensor/cpu/columns-inl.h>
#include <lockstep/tensor/cpu/reduce_rows.h>
#include <lockstep/tensor/cpu/scalar_value.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

#define LOCKSTEP_FORMULA HWY_INLINE
#include <lockstep/tensor/reductions-inl.h>
#undef LOCKSTEP_FORMULA

namespace {

using cpu::One, cpu::TotalOf, cpu::Wide;

template <class R, class T>
struct Mapped {
  const T* x;
  HWY_INLINE Pack<T> whole(int64_t i) const { return R().map(load(x + i)); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return R().map(load_first(x + i, k, Pack<T>(0)));
  }
};

/// Whether a sum over n elements in T is as good as one in Wide<T>.
template <class R, class T>
HWY_INLINE bool is_exact_enough(double sum, int64_t n) {
  if constexpr (R::linear)
    return std::abs(sum) <= std::numeric_limits<double>::max();
  else
    return cpu::in_range<T>(sum, n);
}
template <class R, class T>
Wide<T> sum_wide(const T* x, int64_t stride, int64_t n) {
  Wide<T> sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += R().map(One<Wide<T>>(x[i * stride])).v;
  return sum;
}

template <class R, class T>
struct AddColumns {
  const T* x;
  int64_t stride;
  Wide<T>* sums;
  HWY_INLINE void tile(int64_t r, int64_t rows, int64_t column, int64_t n) const {
    const T* from = x + r * stride + column;
    T run[kColumns];
    std::fill_n(run, n, T(0));
    add_in_t(R(), from, stride, rows, n, run);
    for (int64_t j = 0; j < n; ++j) {
      bool good = std::abs(run[j]) <= std::numeric_limits<T>::max();
      if constexpr (!R::linear) good = cpu::in_range<T>(run[j], rows);
      sums[column + j] += good ? Wide<T>(run[j]) : sum_wide<R>(from + j, stride, rows);
    }
  }
};

template <class R, class T>
HWY_INLINE Pack<T> combined(Pack<T> a, Pack<T> x) {
  return R().combine(a, R().map(x));
}

template <class R, class T>
void row(const T* x, int64_t n, TotalOf<R, T>& total) {
  if constexpr (R::additive) {
    const double sum = sum_terms<T>(n, Mapped<R, T>{x});
    total += is_exact_enough<R, T>(sum, n) ? Wide<T>(sum) : sum_wide<R>(x, 1, n);
  } else {
    const int64_t lanes = lanes_of<T>();
    const Pack<T> nothing(R::template identity<T>());
    Pack<T> a = nothing, b = nothing, c = nothing, d = nothing;
    int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      a = combined<R, T>(a, load(x + i));
      b = combined<R, T>(b, load(x + i + lanes));
      c = combined<R, T>(c, load(x + i + 2 * lanes));
      d = combined<R, T>(d, load(x + i + 3 * lanes));
    }
    for (; i + lanes <= n; i += lanes) a = combined<R, T>(a, load(x + i));
    a = R().combine(R().combine(a, b), R().combine(c, d));
    HWY_ALIGN T each[HWY_MAX_BYTES / sizeof(T)];
    hn::Store(a.r, hn::ScalableTag<T>(), each);
    One<T> all(total);
    for (int64_t k = 0; k < lanes; ++k) all = R().combine(all, One<T>(each[k]));
    for (; i < n; ++i) all = R().combine(all, R().map(One<T>(x[i])));
    total = all.v;
  }
}

template <class R, class T>
void columns(const T* x, int64_t stride, int64_t rows, int64_t n, TotalOf<R, T>* totals) {
  if constexpr (R::additive) {
    for_each_tile(rows, n, AddColumns<R, T>{x, stride, totals});
  } else {
    const int64_t lanes = lanes_of<T>();
    for (int64_t r = 0; r < rows; ++r, x += stride) {
      int64_t j = 0;
      for (; j + lanes <= n; j += lanes)
        store<T>(combined<R, T>(load(totals + j), load(x + j)), totals + j);
      for (; j < n; ++j)
        totals[j] = R().combine(One<T>(totals[j]), R().map(One<T>(x[j]))).v;
    }
  }
}

/// The rows of this target's reductions, under the names of the caller's.
template <class T, class... R, class... HostR>
const std::tuple<cpu::ReduceRows<HostR, T>...>* table(List<R...>, List<HostR...>) {
  static constexpr std::tuple<cpu::ReduceRows<HostR, T>...> t{
      cpu::ReduceRows<HostR, T>{row<R, T>, columns<R, T>}...};
  return &t;
}

}  // namespace

const cpu::ReduceTable<float>* reduce_table_f32() {
  return table<float>(Reductions(), reductions::Reductions());
}
const cpu::ReduceTable<double>* reduce_table_f64() {
  return table<double>(Reductions(), reductions::Reductions());
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(reduce_table_f32);
HWY_EXPORT(reduce_table_f64);
template <>
const cpu::ReduceTable<float>& cpu::reduce_table<float>() {
  static const ReduceTable<float>* t = (respect_isa_limit(), HWY_DYNAMIC_DISPATCH(reduce_table_f32)());
  return *t;
}
template <>
const cpu::ReduceTable<double>& cpu::reduce_table<double>() {
  static const ReduceTable<double>* t =
      (respect_isa_limit(), HWY_DYNAMIC_DISPATCH(reduce_table_f64)());
  return *t;
}
}  // namespace lockstep
#endif

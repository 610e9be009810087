// What loops over one row share: the partial pack at its end, and sums of packs that stay accurate
// however long the row is.
#if defined(LOCKSTEP_TENSOR_CPU_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_ROW_INL_H_
#undef LOCKSTEP_TENSOR_CPU_ROW_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_ROW_INL_H_
#endif

#include <cstdint>

#include <lockstep/tensor/cpu/math-inl.h>
#include <lockstep/tensor/cpu/moments.h>
#include <lockstep/tensor/cpu/pack-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

template <class T>
HWY_INLINE int64_t lanes_of() {
  return static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
}

/// The first k elements at p; `rest` in the other lanes.
template <class T>
HWY_INLINE Pack<T> load_first(const T* p, int64_t k, Pack<T> rest) {
  const auto mask = hn::FirstN(hn::ScalableTag<T>(), static_cast<size_t>(k));
  return hn::IfThenElse(mask, load_some(p, static_cast<size_t>(k)).r, rest.r);
}
template <class T>
HWY_INLINE void store_first(Pack<T> v, T* p, int64_t k) {
  store_some(v, p, static_cast<size_t>(k));
}
/// How a pack of a row is reached: all of its lanes, or the first k (the others read as 0).
template <class T>
struct WholePack {
  HWY_INLINE Pack<T> get(const T* p) const { return load(p); }
  HWY_INLINE void put(Pack<T> v, T* p) const { store<T>(v, p); }
};
template <class T>
struct PartOfPack {
  int64_t k;
  HWY_INLINE Pack<T> get(const T* p) const { return load_some(p, static_cast<size_t>(k)); }
  HWY_INLINE void put(Pack<T> v, T* p) const { store_some(v, p, static_cast<size_t>(k)); }
};

/// v in the first k lanes, 0 in the others.
template <class T>
HWY_INLINE Pack<T> first(Pack<T> v, int64_t k) {
  return hn::IfThenElseZero(hn::FirstN(hn::ScalableTag<T>(), static_cast<size_t>(k)), v.r);
}

template <class T>
HWY_INLINE T sum_of(Pack<T> v) {
  const hn::ScalableTag<T> d;
  return hn::GetLane(hn::SumOfLanes(d, v.r));
}

/// The largest lane, or NaN if there is one.
template <class T>
HWY_INLINE T max_of(Pack<T> v) {
  const hn::ScalableTag<T> d;
  if (!hn::AllFalse(d, hn::IsNaN(v.r))) return std::numeric_limits<T>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, v.r));
}

/// Adds packs in four chains. A chain is at most 16 long in T, and 16 of these sums meet in T
/// before they are added in double, so that the rounding error does not grow with the row.
template <class T>
struct Adder {
  static constexpr int64_t kChain = 16;
  Pack<T> run[4];
  Pack<T> runs;
  double total;
  HWY_INLINE Adder()
      : run{Pack<T>(0), Pack<T>(0), Pack<T>(0), Pack<T>(0)}, runs(Pack<T>(0)), total(0) {}
  HWY_INLINE void end_chains() {
    runs = runs + ((run[0] + run[1]) + (run[2] + run[3]));
    run[0] = run[1] = run[2] = run[3] = Pack<T>(0);
  }
  HWY_INLINE void end_runs() {
    total += static_cast<double>(sum_of(runs));
    runs = Pack<T>(0);
  }
};

/// The sum of a term over a row of n elements: term.whole(i) is the pack that begins at i,
/// term.part(i, k) one of which only the first k lanes count.
template <class T, class Term>
HWY_INLINE double sum_terms(int64_t n, const Term& term) {
  const int64_t lanes = lanes_of<T>(), step = 4 * lanes;
  Adder<T> sum;
  int64_t i = 0;
  for (int chains = 0; i + step <= n;) {
    const int64_t pieces = (n - i) / step;
    const int64_t end = i + (pieces < sum.kChain ? pieces : sum.kChain) * step;
    for (; i < end; i += step) {
      sum.run[0] = sum.run[0] + term.whole(i);
      sum.run[1] = sum.run[1] + term.whole(i + lanes);
      sum.run[2] = sum.run[2] + term.whole(i + 2 * lanes);
      sum.run[3] = sum.run[3] + term.whole(i + 3 * lanes);
    }
    sum.end_chains();
    if (++chains % sum.kChain == 0) sum.end_runs();
  }
  for (; i + lanes <= n; i += lanes) sum.run[0] = sum.run[0] + term.whole(i);
  if (i < n) sum.run[1] = sum.run[1] + first(term.part(i, n - i), n - i);
  sum.end_chains();
  sum.end_runs();
  return sum.total;
}

/// Operands of a row: its elements, or their differences from a centre and the squares of these.
template <class T>
struct Element {
  const T* p;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(p + i); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const { return load_first(p + i, k, Pack<T>(0)); }
};
template <class T>
struct Deviation {
  const T* x;
  Pack<T> centre;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(x + i) - centre; }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(x + i, k, centre) - centre;
  }
};
template <class T>
struct SquaredDeviation {
  Deviation<T> d;
  HWY_INLINE Pack<T> whole(int64_t i) const { return d.whole(i) * d.whole(i); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const { return d.part(i, k) * d.part(i, k); }
};

/// The sum of a row. What overflows in T is summed again in Wide<T>.
template <class T>
HWY_INLINE cpu::Wide<T> row_sum(const T* x, int64_t n) {
  cpu::Wide<T> sum = sum_terms<T>(n, Element<T>{x});
  if (!(std::abs(sum) <= std::numeric_limits<double>::max())) {
    sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
  }
  return sum;
}
/// The moments of a row of n >= 1 elements, in up to three passes over memory that is in cache.
template <class T>
HWY_INLINE cpu::Moments<T> row_moments(const T* x, int64_t n) {
  const Deviation<T> d{x, Pack<T>(static_cast<double>(row_sum(x, n) / n))};
  const double squares = sum_terms<T>(n, SquaredDeviation<T>{d});
  if (!cpu::in_range<T>(squares, n)) return cpu::Moments<T>::strided(x, 1, n);
  const T centre = hn::GetLane(d.centre.r);
  // Values that spread as far as they are from 0 do not feel the rounding of their mean.
  if (squares >= static_cast<double>(n) * static_cast<double>(centre) * static_cast<double>(centre))
    return {static_cast<cpu::Wide<T>>(n), centre, squares};
  return cpu::Moments<T>::about(centre, n, sum_terms<T>(n, d), squares);
}

/// y[i] = f at i, for a row.
template <class T, class F>
HWY_INLINE void fill_row(int64_t n, T* y, const F& f) {
  const int64_t lanes = lanes_of<T>();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store<T>(f.whole(i), y + i);
  if (i < n) store_first<T>(f.part(i, n - i), y + i, n - i);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

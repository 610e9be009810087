// Softmax down columns, for every instruction set: a pack of neighbouring columns is computed at a
// time, row by row. Short runs of rows are summed in T and their sums in double.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/softmax_columns.cpp>
#include <hwy/foreach_target.h>

#include <algorithm>

#include <lockstep/tensor/cpu/row-inl.h>
#include <lockstep/tensor/cpu/softmax_columns.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

namespace {

using cpu::kSoftmaxColumns, cpu::Wide;

/// Calls f.at(how a pack is reached, its first column) for all packs of a row of n columns.
template <class T, class F>
HWY_INLINE void each_pack(int64_t n, const F& f) {
  const int64_t lanes = lanes_of<T>();
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) f.at(WholePack<T>(), j);
  if (j < n) f.at(PartOfPack<T>{n - j}, j);
}

template <class T>
struct TakeMax {  // max = the larger of max and x
  const T* x;
  T* max_of;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(max(c.get(max_of + j), c.get(x + j)), max_of + j);
  }
};
template <class T>
struct AddExp {  // sum += exp(x - max), written to y on the way
  const T *x, *max_of;
  T *y, *sum;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    const Pack<T> e = exp(c.get(x + j) - c.get(max_of + j));
    if (y) c.put(e, y + j);
    c.put(c.get(sum + j) + e, sum + j);
  }
};
template <class T>
struct AddProduct {  // sum += a b
  const T *a, *b;
  T* sum;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(c.get(sum + j) + c.get(a + j) * c.get(b + j), sum + j);
  }
};
template <class T>
struct Add {  // sum += x
  const T* x;
  T* sum;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(c.get(sum + j) + c.get(x + j), sum + j);
  }
};
template <class T>
struct Scale {  // y *= factor
  const T* factor;
  T* y;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(c.get(y + j) * c.get(factor + j), y + j);
  }
};
template <class T>
struct Shift {  // y = x - a - b
  const T *x, *a, *b;
  T* y;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(c.get(x + j) - c.get(a + j) - c.get(b + j), y + j);
  }
};
template <class T>
struct SoftmaxGradient {  // dx = y (dy - dot)
  const T *y, *dy, *dot;
  T* dx;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(c.get(y + j) * (c.get(dy + j) - c.get(dot + j)), dx + j);
  }
};
template <class T>
struct LogSoftmaxGradient {  // dx = dy - exp(y) a b
  const T *y, *dy, *a, *b;
  T* dx;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    c.put(c.get(dy + j) - exp(c.get(y + j)) * c.get(a + j) * c.get(b + j), dx + j);
  }
};
template <class T>
struct ScaledSoftmax {  // dx = (exp(x - max - log_sum) - base) scale
  const T *x, *max_of, *log_sum, *scale;
  Pack<T> base;
  T* dx;
  template <class Columns>
  HWY_INLINE void at(Columns c, int64_t j) const {
    const Pack<T> p = exp(c.get(x + j) - c.get(max_of + j) - c.get(log_sum + j));
    c.put((p - base) * c.get(scale + j), dx + j);
  }
};

/// A term of a sum down columns: add(r, run) adds row r's to the run of sums.
template <class T>
struct ExpTerm {
  const T* x;
  int64_t stride, columns;
  const T* max_of;
  T* y;
  int64_t y_stride;
  HWY_INLINE void add(int64_t r, T* run) const {
    each_pack<T>(columns, AddExp<T>{x + r * stride, max_of, y ? y + r * y_stride : y, run});
  }
};
template <class T>
struct ProductTerm {
  const T *a, *b;
  int64_t stride, columns;
  HWY_INLINE void add(int64_t r, T* run) const {
    each_pack<T>(columns, AddProduct<T>{a + r * stride, b + r * stride, run});
  }
};
template <class T>
struct PlainTerm {
  const T* x;
  int64_t stride, columns;
  HWY_INLINE void add(int64_t r, T* run) const {
    each_pack<T>(columns, Add<T>{x + r * stride, run});
  }
};

template <class T, class Term>
HWY_INLINE void sum_down(int64_t n, int64_t columns, const Term& term, double* totals) {
  constexpr int64_t kRun = 32;  // rows that are summed in T
  std::fill_n(totals, columns, 0.0);
  T run[kSoftmaxColumns];
  for (int64_t r = 0; r < n;) {
    std::fill_n(run, columns, T(0));
    for (const int64_t end = std::min(n, r + kRun); r < end; ++r) term.add(r, run);
    for (int64_t j = 0; j < columns; ++j) totals[j] += static_cast<double>(run[j]);
  }
}

template <class T>
HWY_INLINE void max_down(const T* x, int64_t stride, int64_t n, int64_t columns, T* max_of) {
  std::copy_n(x, columns, max_of);
  for (int64_t r = 1; r < n; ++r) each_pack<T>(columns, TakeMax<T>{x + r * stride, max_of});
}

template <class T>
void softmax(const T* x, T* y, int64_t stride, int64_t n, int64_t columns) {
  T max_of[kSoftmaxColumns], factor[kSoftmaxColumns];
  double sums[kSoftmaxColumns];
  max_down(x, stride, n, columns, max_of);
  sum_down<T>(n, columns, ExpTerm<T>{x, stride, columns, max_of, y, stride}, sums);
  for (int64_t j = 0; j < columns; ++j) factor[j] = static_cast<T>(1 / sums[j]);
  for (int64_t r = 0; r < n; ++r) each_pack<T>(columns, Scale<T>{factor, y + r * stride});
}
template <class T>
void log_sum_exp(const T* x, int64_t stride, int64_t n, int64_t columns, T* max_of, T* log_sum) {
  double sums[kSoftmaxColumns];
  max_down(x, stride, n, columns, max_of);
  sum_down<T>(n, columns, ExpTerm<T>{x, stride, columns, max_of, nullptr, 0}, sums);
  for (int64_t j = 0; j < columns; ++j) log_sum[j] = static_cast<T>(std::log(sums[j]));
}
template <class T>
void log_softmax(const T* x, T* y, int64_t stride, int64_t n, int64_t columns) {
  T max_of[kSoftmaxColumns], log_sum[kSoftmaxColumns];
  log_sum_exp(x, stride, n, columns, max_of, log_sum);
  for (int64_t r = 0; r < n; ++r)
    each_pack<T>(columns, Shift<T>{x + r * stride, max_of, log_sum, y + r * stride});
}
template <class T>
void softmax_backward(const T* y, const T* dy, T* dx, int64_t stride, int64_t n, int64_t columns) {
  double sums[kSoftmaxColumns];
  T dot[kSoftmaxColumns];
  sum_down<T>(n, columns, ProductTerm<T>{y, dy, stride, columns}, sums);
  for (int64_t j = 0; j < columns; ++j) dot[j] = static_cast<T>(sums[j]);
  for (int64_t r = 0; r < n; ++r)
    each_pack<T>(columns, SoftmaxGradient<T>{y + r * stride, dy + r * stride, dot, dx + r * stride});
}
template <class T>
void log_softmax_backward(const T* y, const T* dy, T* dx, int64_t stride, int64_t n,
                          int64_t columns) {
  double sums[kSoftmaxColumns];
  T a[kSoftmaxColumns], b[kSoftmaxColumns];
  sum_down<T>(n, columns, PlainTerm<T>{dy, stride, columns}, sums);
  for (int64_t j = 0; j < columns; ++j) {
    Wide<T> sum = sums[j];
    if (!(std::abs(sum) <= std::numeric_limits<T>::max())) {
      sum = 0;
      for (int64_t r = 0; r < n; ++r) sum += dy[r * stride + j];
    }
    // A sum beyond the range of T is a product of two numbers within it.
    b[j] = std::abs(sum) > std::numeric_limits<T>::max() ? T(0x1p100) : T(1);
    a[j] = static_cast<T>(sum / b[j]);
  }
  for (int64_t r = 0; r < n; ++r)
    each_pack<T>(columns,
                 LogSoftmaxGradient<T>{y + r * stride, dy + r * stride, a, b, dx + r * stride});
}
template <class T>
void scaled_softmax(const T* x, int64_t stride, int64_t n, int64_t columns, const T* max_of,
                    const T* log_sum, T base, const T* scale, T* dx) {
  for (int64_t r = 0; r < n; ++r)
    each_pack<T>(columns, ScaledSoftmax<T>{x + r * stride, max_of, log_sum, scale, Pack<T>(base),
                                           dx + r * stride});
}

template <class T>
const cpu::SoftmaxColumns<T>* columns_of() {
  static constexpr cpu::SoftmaxColumns<T> columns{
      softmax<T>, log_softmax<T>, softmax_backward<T>, log_softmax_backward<T>, log_sum_exp<T>,
      scaled_softmax<T>};
  return &columns;
}

}  // namespace

const cpu::SoftmaxColumns<float>* softmax_columns_f32() { return columns_of<float>(); }
const cpu::SoftmaxColumns<double>* softmax_columns_f64() { return columns_of<double>(); }

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(softmax_columns_f32);
HWY_EXPORT(softmax_columns_f64);
template <>
const cpu::SoftmaxColumns<float>& cpu::softmax_columns<float>() {
  static const cpu::SoftmaxColumns<float>* columns =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(softmax_columns_f32)());
  return *columns;
}
template <>
const cpu::SoftmaxColumns<double>& cpu::softmax_columns<double>() {
  static const cpu::SoftmaxColumns<double>* columns =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(softmax_columns_f64)());
  return *columns;
}
}  // namespace lockstep
#endif

// Rows of softmax for every instruction set. The maximum is taken out first, so nothing overflows;
// a NaN anywhere, or a row of nothing but -inf, makes the row NaN.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/softmax_rows.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/tensor/cpu/row-inl.h>
#include <lockstep/tensor/cpu/softmax_rows.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

namespace {

template <class T>
HWY_INLINE T max_row(const T* x, int64_t n) {
  const int64_t lanes = lanes_of<T>();
  const Pack<T> lowest = -Pack<T>::inf();
  Pack<T> a = lowest, b = lowest;
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    a = max(a, load(x + i));
    b = max(b, load(x + i + lanes));
  }
  if (i + lanes <= n) {
    a = max(a, load(x + i));
    i += lanes;
  }
  if (i < n) b = max(b, load_first(x + i, n - i, lowest));
  return max_of(max(a, b));
}

template <class T>
struct ExpOf {  // exp(x - shift), written to y on the way
  const T* x;
  T* y;
  Pack<T> shift;
  HWY_INLINE Pack<T> whole(int64_t i) const {
    const Pack<T> e = exp(load(x + i) - shift);
    if (y) store<T>(e, y + i);
    return e;
  }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    const Pack<T> e = exp(load_first(x + i, k, shift) - shift);
    if (y) store_first<T>(e, y + i, k);
    return e;
  }
};
template <class T>
struct Scaled {  // x * factor
  const T* x;
  Pack<T> factor;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(x + i) * factor; }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(x + i, k, Pack<T>(0)) * factor;
  }
};
template <class T>
struct Shifted {  // x - a - b
  const T* x;
  Pack<T> a, b;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(x + i) - a - b; }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(x + i, k, Pack<T>(0)) - a - b;
  }
};
template <class T>
struct Product {  // a * b
  const T *a, *b;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(a + i) * load(b + i); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(a + i, k, Pack<T>(0)) * load_first(b + i, k, Pack<T>(0));
  }
};
template <class T>
struct SoftmaxGradient {  // y * (dy - dot)
  const T *y, *dy;
  Pack<T> dot;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(y + i) * (load(dy + i) - dot); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(y + i, k, Pack<T>(0)) * (load_first(dy + i, k, Pack<T>(0)) - dot);
  }
};
template <class T>
struct LogSoftmaxGradient {  // dy - exp(y) * a * b
  const T *y, *dy;
  Pack<T> a, b;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(dy + i) - exp(load(y + i)) * a * b; }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return load_first(dy + i, k, Pack<T>(0)) - exp(load_first(y + i, k, Pack<T>(0))) * a * b;
  }
};
template <class T>
struct ScaledSoftmax {  // (exp(x - max - log_sum) - base) * scale
  const T* x;
  Pack<T> max, log_sum, base, scale;
  HWY_INLINE Pack<T> of(Pack<T> v) const { return (exp(v - max - log_sum) - base) * scale; }
  HWY_INLINE Pack<T> whole(int64_t i) const { return of(load(x + i)); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return of(load_first(x + i, k, Pack<T>(0)));
  }
};

template <class T>
void softmax_row(const T* x, T* y, int64_t n) {
  const Pack<T> shift(max_row(x, n));
  const double sum = sum_terms<T>(n, ExpOf<T>{x, y, shift});
  fill_row<T>(n, y, Scaled<T>{y, Pack<T>(1 / sum)});
}
template <class T>
void log_sum_exp_row(const T* x, int64_t n, T* max, T* log_sum) {
  *max = max_row(x, n);
  *log_sum = static_cast<T>(std::log(sum_terms<T>(n, ExpOf<T>{x, nullptr, Pack<T>(*max)})));
}
template <class T>
void log_softmax_row(const T* x, T* y, int64_t n) {
  T max, log_sum;
  log_sum_exp_row(x, n, &max, &log_sum);
  fill_row<T>(n, y, Shifted<T>{x, Pack<T>(max), Pack<T>(log_sum)});
}
template <class T>
void softmax_backward_row(const T* y, const T* dy, T* dx, int64_t n) {
  const double dot = sum_terms<T>(n, Product<T>{y, dy});
  fill_row<T>(n, dx, SoftmaxGradient<T>{y, dy, Pack<T>(dot)});
}
template <class T>
void log_softmax_backward_row(const T* y, const T* dy, T* dx, int64_t n) {
  const cpu::Wide<T> sum = row_sum(dy, n);
  // A sum beyond the range of T is a product of two numbers within it.
  const T b = std::abs(sum) > std::numeric_limits<T>::max() ? T(0x1p100) : T(1);
  fill_row<T>(n, dx, LogSoftmaxGradient<T>{y, dy, Pack<T>(static_cast<double>(sum / b)), Pack<T>(b)});
}
template <class T>
void scaled_softmax_row(const T* x, T max, T log_sum, T base, T scale, T* dx, int64_t n) {
  fill_row<T>(n, dx,
              ScaledSoftmax<T>{x, Pack<T>(max), Pack<T>(log_sum), Pack<T>(base), Pack<T>(scale)});
}

template <class T>
const cpu::SoftmaxRows<T>* rows_of() {
  static constexpr cpu::SoftmaxRows<T> rows{softmax_row<T>,          log_softmax_row<T>,
                                            softmax_backward_row<T>, log_softmax_backward_row<T>,
                                            log_sum_exp_row<T>,      scaled_softmax_row<T>};
  return &rows;
}

}  // namespace

const cpu::SoftmaxRows<float>* softmax_rows_f32() { return rows_of<float>(); }
const cpu::SoftmaxRows<double>* softmax_rows_f64() { return rows_of<double>(); }

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(softmax_rows_f32);
HWY_EXPORT(softmax_rows_f64);
template <>
const cpu::SoftmaxRows<float>& cpu::softmax_rows<float>() {
  static const cpu::SoftmaxRows<float>* rows =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(softmax_rows_f32)());
  return *rows;
}
template <>
const cpu::SoftmaxRows<double>& cpu::softmax_rows<double>() {
  static const cpu::SoftmaxRows<double>* rows =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(softmax_rows_f64)());
  return *rows;
}
}  // namespace lockstep
#endif

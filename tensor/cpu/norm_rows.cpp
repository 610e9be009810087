// Rows of layer norm and batch norm. Means and variances are taken in two passes (the second over a
// row that is still in cache), with sums in double, so a large mean costs no accuracy.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/norm_rows.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/tensor/cpu/norm_rows.h>
#include <lockstep/tensor/cpu/row-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

namespace {

/// Operands of a row: elements, or one number for all.
template <class T>
struct Each {
  const T* p;
  HWY_INLINE Pack<T> whole(int64_t i) const { return load(p + i); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const { return load_first(p + i, k, Pack<T>(0)); }
};
template <class T>
struct Same {
  Pack<T> v;
  HWY_INLINE Pack<T> whole(int64_t) const { return v; }
  HWY_INLINE Pack<T> part(int64_t, int64_t) const { return v; }
};

template <class T>
struct SquareFrom {
  const T* x;
  Pack<T> centre;
  HWY_INLINE Pack<T> of(Pack<T> v) const { return (v - centre) * (v - centre); }
  HWY_INLINE Pack<T> whole(int64_t i) const { return of(load(x + i)); }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const { return of(load_first(x + i, k, centre)); }
};

/// (x - mean) * scale + shift
template <class T, class Mean, class Scale, class Shift>
struct Affine {
  const T* x;
  Mean mean;
  Scale scale;
  Shift shift;
  HWY_INLINE Pack<T> whole(int64_t i) const {
    return (load(x + i) - mean.whole(i)) * scale.whole(i) + shift.whole(i);
  }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return (load_first(x + i, k, Pack<T>(0)) - mean.part(i, k)) * scale.part(i, k) +
           shift.part(i, k);
  }
};
/// (x - mean) * rstd * weight + bias
template <class T, class Weight, class Bias>
struct Normal {
  const T* x;
  Pack<T> mean, rstd;
  Weight weight;
  Bias bias;
  HWY_INLINE Pack<T> whole(int64_t i) const {
    return (load(x + i) - mean) * rstd * weight.whole(i) + bias.whole(i);
  }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return (load_first(x + i, k, Pack<T>(0)) - mean) * rstd * weight.part(i, k) + bias.part(i, k);
  }
};
/// scale * (dy - a - (x - mean) * b)
template <class T, class Operand>
struct AffineGradient {
  const T *dy, *x;
  Operand mean, scale, a, b;
  HWY_INLINE Pack<T> whole(int64_t i) const {
    return scale.whole(i) *
           (load(dy + i) - a.whole(i) - (load(x + i) - mean.whole(i)) * b.whole(i));
  }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return scale.part(i, k) * (load_first(dy + i, k, Pack<T>(0)) - a.part(i, k) -
                               (load_first(x + i, k, Pack<T>(0)) - mean.part(i, k)) * b.part(i, k));
  }
};

/// One row of layer_norm's backward: with g = dy weight and xhat = (x - mean) rstd, first the means
/// c1 of g and c2 of g xhat; then dx = rstd (g - c1 - xhat c2), dweight += dy xhat and dbias += dy.
template <class T>
struct LayerNormGradient {
  const T *dy, *x, *weight;
  T *dx, *dweight, *dbias;
  Pack<T> mean, rstd;

  template <class Columns>
  HWY_INLINE Pack<T> g(Columns columns, int64_t i) const {
    const Pack<T> v = columns.get(dy + i);
    return weight ? v * columns.get(weight + i) : v;
  }
  template <class Columns>
  HWY_INLINE Pack<T> normal(Columns columns, int64_t i) const {
    return (columns.get(x + i) - mean) * rstd;
  }
  template <class Columns>
  HWY_INLINE void write(Columns columns, int64_t i, Pack<T> c1, Pack<T> c2) const {
    const Pack<T> xhat = normal(columns, i);
    if (dx) columns.put(rstd * (g(columns, i) - c1 - xhat * c2), dx + i);
    if (dweight) columns.put(columns.get(dweight + i) + columns.get(dy + i) * xhat, dweight + i);
    if (dbias) columns.put(columns.get(dbias + i) + columns.get(dy + i), dbias + i);
  }

  HWY_INLINE void run(int64_t n) const {
    const int64_t lanes = lanes_of<T>();
    double sums[2] = {0, 0};
    for (int64_t i = 0; dx && i < n;) {
      const int64_t end = n - i > 32 * lanes ? i + 32 * lanes : n;  // so many are summed in T
      Pack<T> a(0), b(0);
      for (; i + lanes <= end; i += lanes) {
        const Pack<T> v = g(WholePack<T>(), i);
        a = a + v;
        b = b + v * normal(WholePack<T>(), i);
      }
      if (i < end) {
        const PartOfPack<T> rest{end - i};
        const Pack<T> v = g(rest, i);
        a = a + v;
        b = b + first(v * normal(rest, i), end - i);
        i = end;
      }
      sums[0] += static_cast<double>(sum_of(a));
      sums[1] += static_cast<double>(sum_of(b));
    }
    const Pack<T> c1(sums[0] / static_cast<double>(n)), c2(sums[1] / static_cast<double>(n));
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) write(WholePack<T>(), i, c1, c2);
    if (i < n) write(PartOfPack<T>{n - i}, i, c1, c2);
  }
};

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, double eps, T* y, T* statistics,
                    int64_t n) {
  const double count = static_cast<double>(n);
  const T mean = static_cast<T>(sum_terms<T>(n, Each<T>{x}) / count);
  const double variance = sum_terms<T>(n, SquareFrom<T>{x, Pack<T>(mean)}) / count;
  const T rstd = static_cast<T>(1 / std::sqrt(variance + eps));
  statistics[0] = mean;
  statistics[1] = rstd;
  const Pack<T> m(mean), r(rstd);
  const Same<T> one{Pack<T>(1)}, zero{Pack<T>(0)};
  if (weight && bias)
    fill_row<T>(n, y, Normal<T, Each<T>, Each<T>>{x, m, r, {weight}, {bias}});
  else if (weight)
    fill_row<T>(n, y, Normal<T, Each<T>, Same<T>>{x, m, r, {weight}, zero});
  else if (bias)
    fill_row<T>(n, y, Normal<T, Same<T>, Each<T>>{x, m, r, one, {bias}});
  else
    fill_row<T>(n, y, Normal<T, Same<T>, Same<T>>{x, m, r, one, zero});
}

template <class T>
void layer_norm_backward_row(const T* dy, const T* x, const T* weight, const T* statistics, T* dx,
                             T* dweight, T* dbias, int64_t n) {
  LayerNormGradient<T>{
      dy, x, weight, dx, dweight, dbias, Pack<T>(statistics[0]), Pack<T>(statistics[1])}
      .run(n);
}

template <class T>
void affine_row(const T* x, const T* mean, const T* scale, const T* shift, T* y, int64_t n) {
  fill_row<T>(n, y, Affine<T, Each<T>, Each<T>, Each<T>>{x, {mean}, {scale}, {shift}});
}
template <class T>
void affine_plane(const T* x, T mean, T scale, T shift, T* y, int64_t n) {
  fill_row<T>(
      n, y,
      Affine<T, Same<T>, Same<T>, Same<T>>{x, {Pack<T>(mean)}, {Pack<T>(scale)}, {Pack<T>(shift)}});
}
template <class T>
void affine_backward_row(const T* dy, const T* x, const T* mean, const T* scale, const T* a,
                         const T* b, T* dx, int64_t n) {
  fill_row<T>(n, dx, AffineGradient<T, Each<T>>{dy, x, {mean}, {scale}, {a}, {b}});
}
template <class T>
void affine_backward_plane(const T* dy, const T* x, T mean, T scale, T a, T b, T* dx, int64_t n) {
  fill_row<T>(n, dx,
              AffineGradient<T, Same<T>>{
                  dy, x, {Pack<T>(mean)}, {Pack<T>(scale)}, {Pack<T>(a)}, {Pack<T>(b)}});
}

template <class T>
const cpu::NormRows<T>* rows_of() {
  static constexpr cpu::NormRows<T> rows{layer_norm_row<T>,      layer_norm_backward_row<T>,
                                         affine_row<T>,          affine_plane<T>,
                                         affine_backward_row<T>, affine_backward_plane<T>};
  return &rows;
}

}  // namespace

const cpu::NormRows<float>* norm_rows_f32() { return rows_of<float>(); }
const cpu::NormRows<double>* norm_rows_f64() { return rows_of<double>(); }

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(norm_rows_f32);
HWY_EXPORT(norm_rows_f64);
template <>
const cpu::NormRows<float>& cpu::norm_rows<float>() {
  static const cpu::NormRows<float>* rows =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(norm_rows_f32)());
  return *rows;
}
template <>
const cpu::NormRows<double>& cpu::norm_rows<double>() {
  static const cpu::NormRows<double>* rows =
      (cpu::respect_isa_limit(), HWY_DYNAMIC_DISPATCH(norm_rows_f64)());
  return *rows;
}
}  // namespace lockstep
#endif

// Rows of layer norm and batch norm. The moments of a row are taken while it is in cache, about its
// mean; rows whose spread is near the limits of T are computed in Wide<T>, element by element.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/norm_rows.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/tensor/cpu/norm_rows.h>
#include <lockstep/tensor/cpu/row-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

namespace {

/// An operand of a row that is one number for all elements.
template <class T>
struct Same {
  Pack<T> v;
  HWY_INLINE Pack<T> whole(int64_t) const { return v; }
  HWY_INLINE Pack<T> part(int64_t, int64_t) const { return v; }
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
/// What one row of layer_norm is normalised with: normal = (x - mean) * rstd + shift, where the shift
/// makes up for the rounding of the mean.
template <class T>
struct RowScale {
  Pack<T> mean, rstd, shift;
  HWY_INLINE explicit RowScale(const T* statistics)
      : mean(statistics[0]),
        rstd(1 / statistics[2]),
        shift(-statistics[1] / statistics[2]) {}
  HWY_INLINE Pack<T> operator()(Pack<T> x) const { return mul_add(x - mean, rstd, shift); }
};
/// The same for one element of a row of any spread.
template <class T>
HWY_INLINE cpu::Wide<T> wide_normal(T x, const T* statistics) {
  using W = cpu::Wide<T>;
  return (static_cast<W>(x) - statistics[0] - statistics[1]) / statistics[2];
}
/// normal * weight + bias
template <class T, class Weight, class Bias>
struct Normal {
  const T* x;
  RowScale<T> normal;
  Weight weight;
  Bias bias;
  HWY_INLINE Pack<T> whole(int64_t i) const {
    return mul_add(normal(load(x + i)), weight.whole(i), bias.whole(i));
  }
  HWY_INLINE Pack<T> part(int64_t i, int64_t k) const {
    return mul_add(normal(load_first(x + i, k, Pack<T>(0))), weight.part(i, k), bias.part(i, k));
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

/// One row of layer_norm's backward: with g = dy weight, first the means c1 of g and c2 of
/// g normal; then dx = rstd (g - c1 - normal c2), dweight += dy normal and dbias += dy.
template <class T>
struct LayerNormGradient {
  const T *dy, *x, *weight;
  T *dx, *dweight, *dbias;
  RowScale<T> normal;

  template <class Columns>
  HWY_INLINE Pack<T> g(Columns columns, int64_t i) const {
    const Pack<T> v = columns.get(dy + i);
    return weight ? v * columns.get(weight + i) : v;
  }
  template <class Columns>
  HWY_INLINE void write(Columns columns, int64_t i, Pack<T> c1, Pack<T> c2) const {
    const Pack<T> xhat = normal(columns.get(x + i));
    if (dx) columns.put(normal.rstd * (g(columns, i) - c1 - xhat * c2), dx + i);
    if (dweight) columns.put(columns.get(dweight + i) + columns.get(dy + i) * xhat, dweight + i);
    if (dbias) columns.put(columns.get(dbias + i) + columns.get(dy + i), dbias + i);
  }

  /// False where a sum overflows in T; nothing is written then.
  HWY_INLINE bool run(int64_t n) const {
    const int64_t lanes = lanes_of<T>();
    double sums[2] = {0, 0};
    for (int64_t i = 0; dx && i < n;) {
      const int64_t end = n - i > 32 * lanes ? i + 32 * lanes : n;  // so many are summed in T
      Pack<T> a(0), b(0);
      for (; i + lanes <= end; i += lanes) {
        const Pack<T> v = g(WholePack<T>(), i);
        a = a + v;
        b = b + v * normal(load(x + i));
      }
      if (i < end) {
        const PartOfPack<T> rest{end - i};
        const Pack<T> v = g(rest, i);
        a = a + v;
        b = b + first(v * normal(rest.get(x + i)), end - i);
        i = end;
      }
      sums[0] += static_cast<double>(sum_of(a));
      sums[1] += static_cast<double>(sum_of(b));
    }
    if (!std::isfinite(sums[0]) || !std::isfinite(sums[1])) return false;
    const Pack<T> c1(sums[0] / static_cast<double>(n)), c2(sums[1] / static_cast<double>(n));
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) write(WholePack<T>(), i, c1, c2);
    if (i < n) write(PartOfPack<T>{n - i}, i, c1, c2);
    return true;
  }
};

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, double eps, T* y, T* statistics,
                    int64_t n) {
  const cpu::Moments<T> moments = row_moments(x, n);
  statistics[0] = static_cast<T>(moments.mean);
  statistics[1] = static_cast<T>(moments.mean - statistics[0]);
  statistics[2] = static_cast<T>(std::sqrt(moments.m2 / moments.n + eps));
  if (!cpu::is_moderate<T>(statistics[2])) {
    for (int64_t i = 0; i < n; ++i)
      y[i] = static_cast<T>(wide_normal(x[i], statistics) * (weight ? weight[i] : T(1)) +
                            (bias ? bias[i] : T(0)));
    return;
  }
  const RowScale<T> normal(statistics);
  const Same<T> one{Pack<T>(1)}, zero{Pack<T>(0)};
  if (weight && bias)
    fill_row<T>(n, y, Normal<T, Element<T>, Element<T>>{x, normal, {weight}, {bias}});
  else if (weight)
    fill_row<T>(n, y, Normal<T, Element<T>, Same<T>>{x, normal, {weight}, zero});
  else if (bias)
    fill_row<T>(n, y, Normal<T, Same<T>, Element<T>>{x, normal, one, {bias}});
  else
    fill_row<T>(n, y, Normal<T, Same<T>, Same<T>>{x, normal, one, zero});
}

template <class T>
void wide_layer_norm_backward_row(const T* dy, const T* x, const T* weight, const T* statistics,
                                  T* dx, T* dweight, T* dbias, int64_t n) {
  using W = cpu::Wide<T>;
  W c1 = 0, c2 = 0;
  for (int64_t i = 0; i < n; ++i) {
    const W g = static_cast<W>(dy[i]) * (weight ? weight[i] : T(1));
    c1 += g / n;
    c2 += g * wide_normal(x[i], statistics) / n;
  }
  for (int64_t i = 0; i < n; ++i) {
    const W g = static_cast<W>(dy[i]) * (weight ? weight[i] : T(1)),
            normal = wide_normal(x[i], statistics);
    if (dx) dx[i] = static_cast<T>((g - c1 - normal * c2) / statistics[2]);
    if (dweight) dweight[i] += static_cast<T>(dy[i] * normal);
    if (dbias) dbias[i] += dy[i];
  }
}
template <class T>
void layer_norm_backward_row(const T* dy, const T* x, const T* weight, const T* statistics, T* dx,
                             T* dweight, T* dbias, int64_t n) {
  const LayerNormGradient<T> row{dy, x, weight, dx, dweight, dbias, RowScale<T>(statistics)};
  if (!cpu::is_moderate<T>(statistics[2]) || !row.run(n))
    wide_layer_norm_backward_row(dy, x, weight, statistics, dx, dweight, dbias, n);
}

template <class T>
void affine_row(const T* x, const T* mean, const T* scale, const T* shift, T* y, int64_t n) {
  fill_row<T>(n, y, Affine<T, Element<T>, Element<T>, Element<T>>{x, {mean}, {scale}, {shift}});
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
  fill_row<T>(n, dx, AffineGradient<T, Element<T>>{dy, x, {mean}, {scale}, {a}, {b}});
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

// exp, log, log1p, sigmoid, silu, tanh and pow on Packs, for every input: special values come out
// as C's <cmath> has them, and subnormal results are as accurate as others. Most are computed from
// e^x in twice the precision, so that they are rounded about once. ops/elementwise.h states the
// errors; tests/accuracy_test.cpp measures them.
#if defined(LOCKSTEP_TENSOR_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_MATH_INL_H_
#undef LOCKSTEP_TENSOR_CPU_MATH_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_MATH_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include <lockstep/tensor/cpu/math_constants.h>
#include <lockstep/tensor/cpu/pack-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

// ---- twice the precision ----

/// The sum hi + lo, where lo is below the last digit of hi.
template <class T>
struct Twice {
  Pack<T> hi, lo;
};

/// a + b exactly, where |a| >= |b| or a is 0.
template <class T>
HWY_INLINE Twice<T> exact_sum(Pack<T> a, Pack<T> b) {
  const Pack<T> s = a + b;
  return {s, (a - s) + b};
}
/// a + b exactly, whichever is larger (Knuth, 1969).
template <class T>
HWY_INLINE Twice<T> exact_sum_any(Pack<T> a, Pack<T> b) {
  const Pack<T> s = a + b, b_part = s - a;
  return {s, (a - (s - b_part)) + (b - b_part)};
}
/// a * b exactly; without fused multiply-add by splitting each in halves (Dekker, 1971), so a and b
/// are below the square root of the largest float there.
template <class T>
HWY_INLINE Twice<T> exact_product(Pack<T> a, Pack<T> b) {
  const Pack<T> p = a * b;
#if HWY_NATIVE_FMA
  return {p, hn::MulSub(a.r, b.r, p.r)};
#else
  const Pack<T> factor(MathConstants<T>::kSplit);
  const Pack<T> a_high = factor * a - (factor * a - a), b_high = factor * b - (factor * b - b);
  const Pack<T> a_low = a - a_high, b_low = b - b_high;
  return {p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low};
#endif
}
template <class T>
HWY_INLINE Twice<T> product(Twice<T> a, Twice<T> b) {
  Twice<T> p = exact_product(a.hi, b.hi);
  p.lo = p.lo + (a.hi * b.lo + a.lo * b.hi);
  return p;
}
/// n - q * d exactly, where q is n / d rounded.
template <class T>
HWY_INLINE Pack<T> exact_remainder(Pack<T> n, Pack<T> q, Pack<T> d) {
#if HWY_NATIVE_FMA
  return hn::NegMulAdd(q.r, d.r, n.r);
#else
  const Twice<T> p = exact_product(q, d);
  return (n - p.hi) - p.lo;
#endif
}
template <class T>
HWY_INLINE Twice<T> quotient(Twice<T> n, Twice<T> d) {
  const Pack<T> inverse = Pack<T>(1) / d.hi, q = n.hi * inverse;
  return {q, (exact_remainder(n.hi, q, d.hi) + (n.lo - q * d.lo)) * inverse};
}
template <class T>
HWY_INLINE Twice<T> where(typename Pack<T>::M m, Twice<T> a, Twice<T> b) {
  return {where(m, a.hi, b.hi), where(m, a.lo, b.lo)};
}
/// 1 + e, where 0 <= e <= 1.
template <class T>
HWY_INLINE Twice<T> one_plus(Twice<T> e) {
  const Twice<T> s = exact_sum(Pack<T>(1), e.hi);
  return {s.hi, s.lo + e.lo};
}

/// c[kFirst] + c[kFirst + 1] x + c[kFirst + 2] x^2 + ...
template <size_t kFirst = 0, class T, size_t N>
HWY_INLINE Pack<T> polynomial(Pack<T> x, const T (&c)[N]) {
  Pack<T> y(c[N - 1]);
  for (size_t i = N - 1; i-- > kFirst;) y = mul_add(y, x, Pack<T>(c[i]));
  return y;
}

// ---- e^x ----

/// 2^k for a whole k, where that is a normal number.
template <class T>
HWY_INLINE Pack<T> power_of_two(Pack<T> k) {
  constexpr int kDigits = std::numeric_limits<T>::digits - 1;
  const hn::ScalableTag<T> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  // A whole number added to 1.5 * 2^kDigits stands in the last bits of the sum.
  const auto k_bits = hn::BitCast(bits, (k + Pack<T>(MathConstants<T>::kShift)).r);
  const auto one = hn::BitCast(bits, Pack<T>(1).r);
  return hn::BitCast(d, hn::Add(hn::ShiftLeft<kDigits>(k_bits), one));
}
/// x * 2^k, rounded once where it is subnormal; |k| up to twice the largest exponent.
template <class T>
HWY_INLINE Pack<T> scaled(Pack<T> x, Pack<T> k) {
#if HWY_TARGET == HWY_AVX3  // has an instruction for it
  if constexpr (sizeof(T) == 4)
    return typename Pack<T>::R{_mm512_scalef_ps(x.r.raw, k.r.raw)};
  else
    return typename Pack<T>::R{_mm512_scalef_pd(x.r.raw, k.r.raw)};
#endif
  const Pack<T> shift(MathConstants<T>::kShift), half = (k * Pack<T>(0.5) + shift) - shift;
  return x * power_of_two(half) * power_of_two(k - half);
}

/// 2^power * factor, with factor between 0.7 and 1.42.
template <class T>
struct Exponential {
  Pack<T> power;
  Twice<T> factor;
  HWY_INLINE Twice<T> value() const { return {scaled(factor.hi, power), scaled(factor.lo, power)}; }
};
/// e^(hi + lo): 0 or infinite where it leaves the range; garbage for NaN. The error is 2^-27 of the
/// value in f32, 2^-56 in f64.
template <class T>
HWY_INLINE Exponential<T> exponential(Pack<T> hi, Pack<T> lo = Pack<T>(0)) {
  using C = MathConstants<T>;
  const Pack<T> x = hn::Min(hn::Max(hi.r, Pack<T>(C::kExpLeast).r), Pack<T>(C::kExpMost).r);
  const Pack<T> shift(C::kShift);
  const Pack<T> k = mul_add(x, Pack<T>(1.4426950408889634), shift) - shift;  // to nearest
  const Pack<T> rest = mul_add(-k, Pack<T>(C::kLn2High), x);                 // exact
  const Twice<T> r = exact_sum(rest, mul_add(-k, Pack<T>(C::kLn2Low), lo));
  const Twice<T> y = exact_sum(Pack<T>(1), r.hi);
  const Pack<T> tail = mul_add(r.hi * r.hi, polynomial(r.hi, C::kExp), y.lo + r.lo);
  return {k, exact_sum(y.hi, tail)};
}

template <class T>
HWY_INLINE Pack<T> exp(Pack<T> x) {
  const Exponential<T> e = exponential(x);
  return where(is_nan(x), x, scaled(e.factor.hi, e.power));
}

template <class T>
HWY_INLINE Pack<T> sigmoid(Pack<T> x) {
  const Twice<T> e = exponential(-abs(x)).value();
  const Twice<T> one{Pack<T>(1), Pack<T>(0)};
  const Twice<T> y = quotient(where(x < Pack<T>(0), e, one), one_plus(e));
  return where(is_nan(x), x, y.hi + y.lo);
}

/// x sigmoid(x); the product is made before it is scaled, since it is a normal number for some x
/// whose sigmoid is not.
template <class T>
HWY_INLINE Pack<T> silu(Pack<T> x) {
  const Pack<T> a = abs(x), zero(0), limit(-MathConstants<T>::kExpLeast);
  const Exponential<T> e = exponential(-a);
  const auto negative = x < zero;
  const Twice<T> t{hn::Min(a.r, limit.r), zero};
  const Twice<T> y = quotient(where(negative, product(t, e.factor), t), one_plus(e.value()));
  const Pack<T> s = scaled(y.hi + y.lo, where(negative, e.power, zero));
  return where(is_nan(x), x, where(x > limit, x, copy_sign(s, x)));
}

/// (1 - e) / (1 + e), with e = exp(-2 |x|); x - x^3 / 3 where it is small.
template <class T>
HWY_INLINE Pack<T> tanh(Pack<T> x) {
  const Pack<T> t = abs(x);
  const Twice<T> e = exponential(Pack<T>(-2) * t).value();
  const Pack<T> difference = Pack<T>(1) - e.hi;
  const Twice<T> q =
      quotient(exact_sum(difference, ((Pack<T>(1) - difference) - e.hi) - e.lo), one_plus(e));
  const Pack<T> small = x - x * (x * x) * Pack<T>(1.0 / 3);
  const Pack<T> y =
      where(t < Pack<T>(MathConstants<T>::kTanhSmall), small, copy_sign(q.hi + q.lo, x));
  return where(is_nan(x), x, y);
}

// ---- logarithms ----

/// Highway's Log is wrong at 0, below, and at infinity.
template <class T>
HWY_INLINE Pack<T> log(Pack<T> x) {
  const Pack<T> zero(0), inf = Pack<T>::inf();
  const Pack<T> y = where(x == inf, x, Pack<T>(hn::Log(hn::ScalableTag<T>(), x.r)));
  return where(x > zero, y, where(x == zero, -inf, Pack<T>::nan()));  // NaN > 0 is false
}

/// log(1 + x): the logarithm of the rounded sum, and what the rounding took. 1.5 ulp.
template <class T>
HWY_INLINE Pack<T> log1p(Pack<T> x) {
  const Pack<T> zero(0);
  const Twice<T> u = exact_sum_any(Pack<T>(1), x);
  // The condition is false for x = -1, and for infinity, where lo is NaN.
  return log(u.hi) + where(abs(u.lo) > zero, u.lo / u.hi, zero);
}

// ---- powers ----

/// What x^p depends on beside |x|^p: whether p is whole, and odd.
struct Exponent {
  double p;
  bool whole, odd;
  explicit Exponent(double p)
      : p(p), whole(p == std::trunc(p)), odd(whole && p / 2 != std::trunc(p / 2)) {}
};

/// x^p in f64, good for an f32 result: the error is about |p log x| 2^-53.
HWY_INLINE Pack<double> pow_for_f32(Pack<double> x, Exponent e) {
  const Pack<double> one(1), zero(0), a = abs(x);
  Pack<double> y = exp(Pack<double>(e.p) * log(a));
  y = where(a == one, one, y);  // 1^inf
  if (e.odd) return copy_sign(y, x);
  if (e.whole) return y;
  // A negative number to a fraction is NaN, save -infinity.
  return where(x < zero, where(x == -Pack<double>::inf(), y, Pack<double>::nan()), y);
}
/// x^n by squaring, in f64 for an f32 result; n >= 1, up to about 2^20.
HWY_INLINE Pack<double> whole_pow_for_f32(Pack<double> x, int64_t n) {
  Pack<double> y(1);
  for (; n > 1; n >>= 1, x = x * x)
    if (n & 1) y = y * x;
  return y * x;
}

HWY_INLINE Pack<float> through_f64(Pack<float> x, Exponent e) {
  constexpr double kMultiplied = 64;
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<double> wide;
#if HWY_TARGET == HWY_SCALAR
  Pack<double> parts[] = {hn::PromoteTo(wide, x.r)};
#else
  const hn::Half<decltype(d)> half;
  Pack<double> parts[] = {hn::PromoteTo(wide, hn::LowerHalf(half, x.r)),
                          hn::PromoteTo(wide, hn::UpperHalf(half, x.r))};
#endif
  for (Pack<double>& part : parts) {
    if (!e.whole || std::fabs(e.p) > kMultiplied) {
      part = pow_for_f32(part, e);
      continue;
    }
    part = whole_pow_for_f32(part, static_cast<int64_t>(std::fabs(e.p)));
    if (e.p < 0) part = Pack<double>(1) / part;
  }
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128  // DemoteTo never gives infinity there
  HWY_ALIGN double doubles[HWY_MAX_BYTES / sizeof(float)];
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  double* next = doubles;
  for (const Pack<double>& part : parts) hn::Store(part.r, wide, next), next += hn::Lanes(wide);
  for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = static_cast<float>(doubles[i]);
  return hn::Load(d, lanes);
#else
  return hn::Combine(d, hn::DemoteTo(half, parts[1].r), hn::DemoteTo(half, parts[0].r));
#endif
}
HWY_INLINE Pack<double> lane_by_lane(Pack<double> x, Exponent e) {
  const hn::ScalableTag<double> d;
  HWY_ALIGN double lanes[HWY_MAX_BYTES / sizeof(double)];
  hn::Store(x.r, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = std::pow(lanes[i], e.p);
  return hn::Load(d, lanes);
}

/// x^p: the usual exponents by multiplication, division and square root; others in f64 for f32, and
/// by <cmath> for f64.
template <class T>
HWY_INLINE Pack<T> pow(Pack<T> x, Number exponent) {
  const double p = exponent.value;
  const Pack<T> one(1);
  if (p == 0) return one;
  if (p == 1) return x;
  if (p == 2) return x * x;
  if (p == 3) return x * x * x;
  if (p == -1) return one / x;
  if (std::fabs(p) == 0.5) {  // sqrt(-0) is -0, and of -inf NaN
    const Pack<T> inf = Pack<T>::inf();
    const Pack<T> root = where(x == -inf, inf, sqrt(x + Pack<T>(0)));
    return p > 0 ? root : one / root;
  }
  if constexpr (sizeof(T) == 4)
    return through_f64(x, Exponent(p));
  else
    return lane_by_lane(x, Exponent(p));
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// exp, log, erf and pow on SIMD vectors, for every input: Highway's with its special values mended,
// and the two that it lacks. f32: erf by polynomials of our own (below 2 ulp), pow through f64
// lanes. f64 erf and pow, which only tests and references use, go through <cmath> lane by lane.
#if defined(LOCKSTEP_TENSOR_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_MATH_INL_H_
#undef LOCKSTEP_TENSOR_CPU_MATH_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_MATH_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Highway's Exp is right up to 104 (f32) and 706 (f64), and 0 at NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_full(D d, V x) {
  using T = hn::TFromD<D>;
  const V limit = hn::Set(d, sizeof(T) == 4 ? static_cast<T>(89) : static_cast<T>(705));
  V y = hn::Exp(d, hn::Min(x, limit));
  if constexpr (sizeof(T) == 8) {  // 705 .. 709.78 is finite still: exp(limit) * exp(the rest)
    const V rest =
        hn::Min(hn::Max(hn::Sub(x, limit), hn::Zero(d)), hn::Set(d, static_cast<T>(700)));
    y = hn::Mul(y, hn::Exp(d, rest));
  }
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// Highway's Log is wrong at 0, below, and at infinity.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V log_full(D d, V x) {
  using T = hn::TFromD<D>;
  const V inf = hn::Set(d, std::numeric_limits<T>::infinity());
  const V y = hn::IfThenElse(hn::Eq(x, inf), x, hn::Log(d, x));
  const V outside = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Neg(inf),
                                   hn::Set(d, std::numeric_limits<T>::quiet_NaN()));
  return hn::IfThenElse(hn::Gt(x, hn::Zero(d)), y, outside);  // NaN > 0 is false
}

/// |x| <= 0.9375: x + x P(x^2); above: 1 - exp(-x Q(x)), with Q fitted to -log(erfc(x)) / x up to
/// 4, where erf rounds to 1. Both least-squares fits with weights that level the relative error.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V erf_f32(D d, V x) {
  const V a = hn::Abs(x), s = hn::Mul(x, x);
  V p = hn::Set(d, 8.26769667665525e-05f);
  p = hn::MulAdd(p, s, hn::Set(d, -0.0008118142949104512f));
  p = hn::MulAdd(p, s, hn::Set(d, 0.005198837322062222f));
  p = hn::MulAdd(p, s, hn::Set(d, -0.02685850104886929f));
  p = hn::MulAdd(p, s, hn::Set(d, 0.1128367907146908f));
  p = hn::MulAdd(p, s, hn::Set(d, -0.3761263264944249f));
  p = hn::MulAdd(p, s, hn::Set(d, 0.12837916652439726f));
  const V inner = hn::MulAdd(p, x, x);

  const V t = hn::Min(a, hn::Set(d, 4.0f));
  V q = hn::Set(d, 1.1795728834196328e-05f);
  q = hn::MulAdd(q, t, hn::Set(d, -0.0003284043248474311f));
  q = hn::MulAdd(q, t, hn::Set(d, 0.003665015411432826f));
  q = hn::MulAdd(q, t, hn::Set(d, -0.0238092840126177f));
  q = hn::MulAdd(q, t, hn::Set(d, 0.10629110502991193f));
  q = hn::MulAdd(q, t, hn::Set(d, 0.635118901421403f));
  q = hn::MulAdd(q, t, hn::Set(d, 1.1286563776292253f));
  const V outer = hn::Sub(hn::Set(d, 1.0f), hn::Exp(d, hn::Neg(hn::Mul(t, q))));

  const V y = hn::IfThenElse(hn::Le(a, hn::Set(d, 0.9375f)), inner, hn::CopySign(outer, x));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// x^p in f64 lanes for an f32 result, by exp(p log|x|): the error is about |p log x| 2^-53.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V pow_f64_for_f32(D d, V x, double p) {
  const V one = hn::Set(d, 1.0), zero = hn::Zero(d), a = hn::Abs(x);
  const V power = hn::Mul(hn::Set(d, p), log_full(d, a));
  V y = hn::Exp(d, hn::Min(power, hn::Set(d, 200.0)));  // e^200 is infinite in f32
  y = hn::IfThenElse(hn::IsNaN(power), power, y);
  y = hn::IfThenElse(hn::Eq(a, one), one, y);      // 1^inf
  const bool huge = !(p > -0x1p53 && p < 0x1p53);  // even, then, or infinite; NaN is huge as well
  const int64_t truncated = huge ? 0 : static_cast<int64_t>(p);
  const bool whole = huge || static_cast<double>(truncated) == p,
             odd = whole && (truncated & 1) != 0;
  if (odd) return hn::CopySign(y, x);
  if (whole) return hn::IfThenElse(hn::IsNaN(x), x, y);
  // A negative base to a fraction is NaN, save -infinity and -0.
  const V nan = hn::Set(d, std::numeric_limits<double>::quiet_NaN());
  const V finite = hn::IfThenElse(hn::Lt(x, zero), nan, y);
  return hn::IfThenElse(hn::Eq(x, hn::Set(d, -std::numeric_limits<double>::infinity())), y, finite);
}

template <class D, class V>
HWY_INLINE V per_lane(D d, V x, double (*f)(double, double), double parameter) {
  HWY_ALIGN double lanes[HWY_MAX_BYTES / sizeof(double)];
  hn::Store(x, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = f(lanes[i], parameter);
  return hn::Load(d, lanes);
}
inline double erf_lane(double x, double) { return std::erf(x); }
inline double pow_lane(double x, double p) { return std::pow(x, p); }

template <class D, class V = hn::Vec<D>>
HWY_INLINE V erf_full(D d, V x) {
  if constexpr (sizeof(hn::TFromD<D>) == 4)
    return erf_f32(d, x);
  else
    return per_lane(d, x, erf_lane, 0);
}

/// The usual exponents are a few multiplications, as PyTorch has them.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V pow_full(D d, V x, double p) {
  using T = hn::TFromD<D>;
  const V one = hn::Set(d, static_cast<T>(1));
  if (p == 2) return hn::Mul(x, x);
  if (p == 3) return hn::Mul(hn::Mul(x, x), x);
  if (p == 1) return x;
  if (p == 0) return one;
  if (p == -1) return hn::Div(one, x);
  if constexpr (sizeof(T) == 8) {
    return per_lane(d, x, pow_lane, p);
  } else {
#if HWY_TARGET == HWY_SCALAR
    const hn::Rebind<double, D> d64;
    return hn::DemoteTo(d, pow_f64_for_f32(d64, hn::PromoteTo(d64, x), p));
#else
    const hn::Half<D> dh;
    const hn::Rebind<double, hn::Half<D>> d64;
    const auto low = pow_f64_for_f32(d64, hn::PromoteTo(d64, hn::LowerHalf(dh, x)), p);
    const auto high = pow_f64_for_f32(d64, hn::PromoteTo(d64, hn::UpperHalf(dh, x)), p);
    return hn::Combine(d, hn::DemoteTo(dh, high), hn::DemoteTo(dh, low));
#endif
  }
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

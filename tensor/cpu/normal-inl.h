// The normal distribution on Packs: its density without the constant, its distribution function Phi,
// and erf and gelu, which are computed from it. All rest on the tail 1 - Phi(t), t >= 0, which is
// e^(-t^2 / 2) times a smooth function, computed in twice the precision.
#if defined(LOCKSTEP_TENSOR_CPU_NORMAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_NORMAL_INL_H_
#undef LOCKSTEP_TENSOR_CPU_NORMAL_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_NORMAL_INL_H_
#endif

#include <lockstep/tensor/cpu/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

/// |x|, or a t whose tail is 0 as x's is.
template <class T>
HWY_INLINE Pack<T> tail_argument(Pack<T> x) {
  return hn::Min(abs(x).r, Pack<T>(MathConstants<T>::kTailLimit).r);
}
/// e^(-t^2 / 2): the square is not rounded, whose error the exponential would multiply by t^2 / 2.
template <class T>
HWY_INLINE Exponential<T> gaussian_of(Pack<T> t) {
  const Twice<T> square = exact_product(t, t);
  const Pack<T> factor(-0.5);
  return exponential(factor * square.hi, factor * square.lo);
}
/// 1 - Phi(t) as a power of two and a factor.
template <class T>
HWY_INLINE Exponential<T> tail(Pack<T> t) {
  using C = MathConstants<T>;
  const Exponential<T> e = gaussian_of(t);
  const Twice<T> d = exact_sum_any(t, Pack<T>(C::kTailA));
  const Twice<T> q = quotient(Twice<T>{t - Pack<T>(C::kTailC), Pack<T>(0)}, d);
  const Pack<T> slope = polynomial<1>(q.hi, C::kTail);
  const Twice<T> rise = exact_product(q.hi, slope);
  Twice<T> p = exact_sum_any(Pack<T>(C::kTail[0]), rise.hi);
  p.lo = p.lo + (rise.lo + q.lo * slope);
  return {e.power, quotient(product(e.factor, p), d)};
}

/// e^(-x^2 / 2)
template <class T>
HWY_INLINE Pack<T> gaussian(Pack<T> x) {
  const Exponential<T> e = gaussian_of(tail_argument(x));
  return where(is_nan(x), x, scaled(e.factor.hi, e.power));
}

/// Phi, the normal distribution function.
template <class T>
HWY_INLINE Pack<T> ndtr(Pack<T> x) {
  const Exponential<T> e = tail(tail_argument(x));
  const Pack<T> y = scaled(e.factor.hi + e.factor.lo, e.power);
  return where(is_nan(x), x, where(x < Pack<T>(0), y, Pack<T>(1) - y));
}

/// x Phi(x) = max(x, 0) - |x| (1 - Phi(|x|)); the product is made before it is scaled, since it is a
/// normal number for some x whose tail is not.
template <class T>
HWY_INLINE Pack<T> gelu(Pack<T> x) {
  const Pack<T> t = tail_argument(x);
  const Exponential<T> e = tail(t);
  const Twice<T> y = product(e.factor, {t, Pack<T>(0)});
  return max(x, Pack<T>(0)) - scaled(y.hi + y.lo, e.power);
}

/// x + x P(x^2) near 0; elsewhere 1 - 2 (1 - Phi(sqrt(2) |x|)).
template <class T>
HWY_INLINE Pack<T> erf(Pack<T> x) {
  using C = MathConstants<T>;
  const Pack<T> a = abs(x), one(1);
  const Pack<T> near = mul_add(x, polynomial(x * x, C::kErf), x);
  const Exponential<T> e = tail(tail_argument(a * Pack<T>(1.4142135623730951)));
  const Pack<T> far = one - scaled((e.factor.hi + e.factor.lo) * Pack<T>(2), e.power);
  const Pack<T> y = where(a <= Pack<T>(C::kErfSmall), near, copy_sign(far, x));
  return where(is_nan(x), x, y);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

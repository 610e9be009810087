// Pack<T>: as many f32 or f64 as the processor handles at once, with arithmetic, comparisons, loads
// and stores. The mathematical functions on Packs are in math-inl.h and normal-inl.h.
//
// Compiled once per SIMD target: include it after <hwy/foreach_target.h>, outside any namespace.
// Functions only, no lambdas (a lambda loses the target).
#if defined(LOCKSTEP_TENSOR_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_PACK_INL_H_
#undef LOCKSTEP_TENSOR_CPU_PACK_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <limits>

#include <lockstep/tensor/formula.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
struct Pack {
  using D = hn::ScalableTag<T>;
  using R = hn::Vec<D>;
  using M = hn::Mask<D>;
  R r;

  HWY_INLINE Pack(R v) : r(v) {}  // NOLINT: implicit
  HWY_INLINE explicit Pack(Number n) : r(hn::Set(D(), n.as<T>())) {}

  friend HWY_INLINE Pack operator+(Pack a, Pack b) { return hn::Add(a.r, b.r); }
  friend HWY_INLINE Pack operator-(Pack a, Pack b) { return hn::Sub(a.r, b.r); }
  friend HWY_INLINE Pack operator*(Pack a, Pack b) { return hn::Mul(a.r, b.r); }
  friend HWY_INLINE Pack operator/(Pack a, Pack b) { return hn::Div(a.r, b.r); }
  friend HWY_INLINE Pack operator-(Pack a) { return hn::Neg(a.r); }
  friend HWY_INLINE M operator<(Pack a, Pack b) { return hn::Lt(a.r, b.r); }
  friend HWY_INLINE M operator<=(Pack a, Pack b) { return hn::Le(a.r, b.r); }
  friend HWY_INLINE M operator>(Pack a, Pack b) { return hn::Gt(a.r, b.r); }
  friend HWY_INLINE M operator>=(Pack a, Pack b) { return hn::Ge(a.r, b.r); }
  friend HWY_INLINE M operator==(Pack a, Pack b) { return hn::Eq(a.r, b.r); }
  friend HWY_INLINE Pack where(M m, Pack a, Pack b) { return hn::IfThenElse(m, a.r, b.r); }
  // Ne(x, x) is false for a NaN on AVX-512.
  friend HWY_INLINE M is_nan(Pack a) { return hn::IsNaN(a.r); }
  static HWY_INLINE Pack inf() { return Pack(std::numeric_limits<T>::infinity()); }
  static HWY_INLINE Pack nan() { return Pack(std::numeric_limits<T>::quiet_NaN()); }

  /// NaN where either is; a where they are equal, as 0 and -0 are. x86's maxps(b, a) is b > a ? b : a;
  /// Highway's Max is another function of NaN and zeros on other targets.
  friend HWY_INLINE Pack max(Pack a, Pack b) {
#if HWY_ARCH_X86 && HWY_TARGET < HWY_EMU128
    return where(is_nan(b), b, Pack(hn::Max(b.r, a.r)));
#else
    return where(is_nan(b), b, where(b > a, b, a));
#endif
  }
  friend HWY_INLINE Pack min(Pack a, Pack b) {
#if HWY_ARCH_X86 && HWY_TARGET < HWY_EMU128
    return where(is_nan(b), b, Pack(hn::Min(b.r, a.r)));
#else
    return where(is_nan(b), b, where(b < a, b, a));
#endif
  }
  friend HWY_INLINE Pack abs(Pack a) { return hn::Abs(a.r); }
  friend HWY_INLINE Pack sqrt(Pack a) { return hn::Sqrt(a.r); }
  friend HWY_INLINE Pack copy_sign(Pack a, Pack sign) { return hn::CopySign(a.r, sign.r); }
  /// a * b + c, rounded once where the processor can.
  friend HWY_INLINE Pack mul_add(Pack a, Pack b, Pack c) { return hn::MulAdd(a.r, b.r, c.r); }
};

template <class T>
HWY_INLINE Pack<T> load(const T* p) {
  return hn::LoadU(hn::ScalableTag<T>(), p);
}
template <class T>
HWY_INLINE void store(Pack<T> v, T* p) {
  hn::StoreU(v.r, hn::ScalableTag<T>(), p);
}
/// The first k lanes; the others are 0, and their memory is not touched.
template <class T>
HWY_INLINE Pack<T> load_some(const T* p, size_t k) {
  const hn::ScalableTag<T> d;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, k), d, p);
#else
  HWY_ALIGN T lanes[HWY_MAX_BYTES / sizeof(T)] = {};
  for (size_t i = 0; i < k; ++i) lanes[i] = p[i];
  return hn::Load(d, lanes);
#endif
}
template <class T>
HWY_INLINE void store_some(Pack<T> v, T* p, size_t k) {
  const hn::ScalableTag<T> d;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  hn::BlendedStore(v.r, hn::FirstN(d, k), d, p);
#else
  HWY_ALIGN T lanes[HWY_MAX_BYTES / sizeof(T)] = {};
  hn::Store(v.r, d, lanes);
  for (size_t i = 0; i < k; ++i) p[i] = lanes[i];
#endif
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

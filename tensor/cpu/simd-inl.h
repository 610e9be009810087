// The SIMD loops of every formula and derivative, over whole packs and a partial pack at the end,
// and their tables for one instruction set.
#if defined(LOCKSTEP_TENSOR_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_SIMD_INL_H_
#undef LOCKSTEP_TENSOR_CPU_SIMD_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_SIMD_INL_H_
#endif

#include <bit>

#include <lockstep/tensor/cpu/elementwise.h>
#include <lockstep/tensor/cpu/normal-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

#define LOCKSTEP_FORMULA HWY_INLINE
#include <lockstep/tensor/formulas-inl.h>
#undef LOCKSTEP_FORMULA

/// The op of this target from the caller's: they are the same text, so they have the same layout.
template <class Op, class HostOp>
HWY_INLINE Op op_from(const void* host) {
  return std::bit_cast<Op>(*static_cast<const HostOp*>(host));
}

/// The operands that an op has not are passed on as others; their loads are optimised away.
template <class Op, class V>
HWY_INLINE V result_of(const Op& op, V a, V b, V c) {
  if constexpr (Op::inputs == 1)
    return op.f(a);
  else if constexpr (Op::inputs == 2)
    return op.f(a, b);
  else
    return op.f(a, b, c);
}

template <class Op, class HostOp, class T>
void forward_row(const void* host, char* const* data, int64_t count, int64_t) {
  const Op op = op_from<Op, HostOp>(host);
  const size_t n = static_cast<size_t>(count), lanes = hn::Lanes(hn::ScalableTag<T>());
  T* y = reinterpret_cast<T*>(data[0]);
  const T* a = reinterpret_cast<const T*>(data[1]);
  const T* b = reinterpret_cast<const T*>(data[Op::inputs > 1 ? 2 : 1]);
  const T* c = reinterpret_cast<const T*>(data[Op::inputs > 2 ? 3 : 1]);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    store<T>(result_of(op, load(a + i), load(b + i), load(c + i)), y + i);
  if (const size_t k = n - i)
    store_some<T>(
        result_of(op, load_some(a + i, k), load_some(b + i, k), load_some(c + i, k)), y + i, k);
}

template <int I, class Op, class V>
HWY_INLINE V derivative_by(const Op& op, V a, V b, V c, V y, V dy) {
  if constexpr (Op::inputs == 1) {
    return op.df(a, y, dy);
  } else if constexpr (Op::inputs == 2) {
    if constexpr (I == 0)
      return op.da(a, b, y, dy);
    else
      return op.db(a, b, y, dy);
  } else {
    if constexpr (I == 0)
      return op.da(a, b, c, y, dy);
    else if constexpr (I == 1)
      return op.db(a, b, c, y, dy);
    else
      return op.dc(a, b, c, y, dy);
  }
}

/// For operands that a derivative does not read it gets dy; the loads are optimised away.
template <int I, class Op, class HostOp, class T>
void derivative_row(const void* host, char* const* data, int64_t count, int64_t) {
  using formulas::Probe;
  constexpr unsigned reads = formulas::reads<HostOp, I>;
  constexpr int has_a = !!(reads & Probe::kA), has_b = !!(reads & Probe::kB),
                has_c = !!(reads & Probe::kC), has_y = !!(reads & Probe::kY);
  constexpr int ia = has_a ? 2 : 1, ib = has_b ? 2 + has_a : 1, ic = has_c ? 2 + has_a + has_b : 1,
                iy = has_y ? 2 + has_a + has_b + has_c : 1;
  const Op op = op_from<Op, HostOp>(host);
  const size_t n = static_cast<size_t>(count), lanes = hn::Lanes(hn::ScalableTag<T>());
  T* dx = reinterpret_cast<T*>(data[0]);
  const T* dy = reinterpret_cast<const T*>(data[1]);
  const T* a = reinterpret_cast<const T*>(data[ia]);
  const T* b = reinterpret_cast<const T*>(data[ib]);
  const T* c = reinterpret_cast<const T*>(data[ic]);
  const T* y = reinterpret_cast<const T*>(data[iy]);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    store<T>(derivative_by<I>(op, load(a + i), load(b + i), load(c + i), load(y + i), load(dy + i)),
             dx + i);
  if (const size_t k = n - i)
    store_some<T>(derivative_by<I>(op, load_some(a + i, k), load_some(b + i, k),
                                   load_some(c + i, k), load_some(y + i, k), load_some(dy + i, k)),
                  dx + i, k);
}

template <class Op, class HostOp>
constexpr cpu::FloatKernels<HostOp> kernels_of() {
  return []<size_t... I>(std::index_sequence<I...>) {
    return cpu::FloatKernels<HostOp>{
        {forward_row<Op, HostOp, float>, forward_row<Op, HostOp, double>},
        {{derivative_row<I, Op, HostOp, float>...}, {derivative_row<I, Op, HostOp, double>...}}};
  }(std::make_index_sequence<Op::inputs>());
}

/// The kernels of a list of ops, given as this target's types and as the caller's.
template <class... Ops, class... HostOps>
const std::tuple<cpu::FloatKernels<HostOps>...>* table(List<Ops...>, List<HostOps...>) {
  static constexpr std::tuple<cpu::FloatKernels<HostOps>...> t{kernels_of<Ops, HostOps>()...};
  return &t;
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Highway compiles this file once per instruction set, each in a namespace of its own, and picks
// among them when the first step runs.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/optim/cpu/rows.cpp>
#include <hwy/foreach_target.h>

#include <lockstep/optim/cpu/rows.h>
#include <lockstep/tensor/cpu/pack-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

// A formula updates one pack of each array in place: v[0] the parameter, v[1] the gradient, v[2]
// ... the states.

template <class V, bool momentum, bool nesterov>
struct SgdFormula {
  static constexpr int arrays = momentum ? 3 : 2;
  V lr, decay, mu, share;
  bool decays;  // 0 times an infinite parameter would be NaN
  HWY_INLINE explicit SgdFormula(const double* c)
      : lr(c[0]), decay(c[1]), mu(c[2]), share(c[3]), decays(c[1] != 0) {}
  HWY_INLINE void operator()(V* v) const {
    V g = v[1];
    if (decays) g = g + decay * v[0];
    if constexpr (momentum) {
      v[2] = mu * v[2] + share * g;
      g = nesterov ? g + mu * v[2] : v[2];
    }
    v[0] = v[0] - lr * g;
  }
};

template <class V, bool amsgrad>
struct AdamFormula {
  static constexpr int arrays = amsgrad ? 5 : 4;
  V step, root, beta1, rest1, beta2, rest2, eps, decay, keep;
  bool decays;
  HWY_INLINE explicit AdamFormula(const double* c)
      : step(c[0]),
        root(c[1]),
        beta1(c[2]),
        rest1(1 - c[2]),
        beta2(c[3]),
        rest2(1 - c[3]),
        eps(c[4]),
        decay(c[5]),
        keep(c[6]),
        decays(c[5] != 0) {}
  HWY_INLINE void operator()(V* v) const {
    const V p = keep * v[0];
    V g = v[1];
    if (decays) g = g + decay * p;
    v[2] = beta1 * v[2] + rest1 * g;
    v[3] = beta2 * v[3] + rest2 * g * g;
    V second = v[3];
    if constexpr (amsgrad) second = v[4] = max(v[4], second);
    v[0] = p - step * v[2] / (sqrt(second) * root + eps);
  }
};

template <class V>
struct ScaleFormula {
  static constexpr int arrays = 1;
  V factor;
  HWY_INLINE explicit ScaleFormula(const double* c) : factor(c[0]) {}
  HWY_INLINE void operator()(V* v) const { v[0] = v[0] * factor; }
};

/// Array 1, the gradient, is only read.
template <class T, class Formula>
void row(const double* constants, void* const* arrays, int64_t begin, int64_t end) {
  constexpr int n = Formula::arrays;
  const Formula f(constants);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  T* p[n];
  for (int k = 0; k < n; ++k) p[k] = static_cast<T*>(arrays[k]);
  int64_t i = begin;
  const Pack<T> zero(0);
  if constexpr (n == 1) {
    Pack<T> v[] = {zero};
    for (; i + lanes <= end; i += lanes) {
      v[0] = load(p[0] + i);
      f(v);
      store(v[0], p[0] + i);
    }
  } else {
    Pack<T> v[] = {zero, zero, zero, zero, zero};
    for (; i + lanes <= end; i += lanes) {
      for (int k = 0; k < n; ++k) v[k] = load(p[k] + i);
      f(v);
      store(v[0], p[0] + i);
      for (int k = 2; k < n; ++k) store(v[k], p[k] + i);
    }
  }
  if (i == end) return;
  const size_t tail = static_cast<size_t>(end - i);
  Pack<T> v[] = {zero, zero, zero, zero, zero};
  for (int k = 0; k < n; ++k) v[k] = load_some(p[k] + i, tail);
  f(v);
  for (int k = 0; k < n; ++k)
    if (k != 1) store_some(v[k], p[k] + i, tail);
}

template <template <class, bool...> class Formula, bool... flags>
optim::cpu::Rows rows() {
  return {row<float, Formula<Pack<float>, flags...>>, row<double, Formula<Pack<double>, flags...>>};
}

const optim::cpu::Table* optimizer_table() {
  static const optim::cpu::Table t{
      rows<SgdFormula, false, false>(),
      rows<SgdFormula, true, false>(),
      rows<SgdFormula, true, true>(),
      rows<AdamFormula, false>(),
      rows<AdamFormula, true>(),
      {row<float, ScaleFormula<Pack<float>>>, row<double, ScaleFormula<Pack<double>>>}};
  return &t;
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(optimizer_table);
namespace optim::cpu {
const Table& table() {
  lockstep::cpu::respect_isa_limit();
  return *HWY_DYNAMIC_DISPATCH(optimizer_table)();
}
}  // namespace optim::cpu
}  // namespace lockstep
#endif

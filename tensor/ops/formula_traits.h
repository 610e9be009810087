// The formulas compiled for the host, and what their derivatives read: each is evaluated at compile
// time on Probes, abstract values that record what they depend on. So what an op saves for backward
// is derived and need not be declared.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>

#include <lockstep/tensor/formula.h>

namespace lockstep {
// Exported, so that a plug-in can enter kernels in the ops' tables.
namespace formulas __attribute__((visibility("default"))) {

#define LOCKSTEP_FORMULA constexpr
#include <lockstep/tensor/formulas-inl.h>
#undef LOCKSTEP_FORMULA

/// Kernels with more than one operand, or a number for one.
using ManyOperandOps = decltype(BinaryOps() + TernaryOps() + NumberOps());
using DifferentiableOps = decltype(UnaryOps() + ManyOperandOps());

/// An abstract value: which of the inputs, the output and dy it depends on.
struct Probe {
  enum : unsigned { kA = 1, kB = 2, kC = 4, kY = 8, kDy = 16 };
  unsigned from = 0;
  bool untouched = false;  // an operand itself, not the result of an operation

  constexpr Probe() = default;
  constexpr Probe(unsigned from, bool untouched) : from(from), untouched(untouched) {}
  constexpr explicit Probe(Number) {}

  friend constexpr Probe both(Probe a, Probe b) { return {a.from | b.from, false}; }
  friend constexpr Probe operator+(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator-(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator*(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator/(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator-(Probe a) { return both(a, a); }
  friend constexpr Probe operator<(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator<=(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator>(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator>=(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe operator==(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe max(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe min(Probe a, Probe b) { return both(a, b); }
  friend constexpr Probe where(Probe m, Probe a, Probe b) { return both(m, both(a, b)); }
  friend constexpr Probe sigmoid(Probe a) { return both(a, a); }
  friend constexpr Probe silu(Probe a) { return both(a, a); }
  friend constexpr Probe gaussian(Probe a) { return both(a, a); }
  friend constexpr Probe ndtr(Probe a) { return both(a, a); }
  friend constexpr Probe pow(Probe a, Number) { return both(a, a); }
};

/// The derivative by input I of any op: op.df, op.da, op.db or op.dc.
template <int I, class Op, class V>
constexpr V derivative(const Op& op, const std::array<V, Op::inputs>& x, const V& y, const V& dy) {
  if constexpr (Op::inputs == 1)
    return op.df(x[0], y, dy);
  else
    return std::apply(
        [&](const auto&... in) {
          if constexpr (I == 0)
            return op.da(in..., y, dy);
          else if constexpr (I == 1)
            return op.db(in..., y, dy);
          else
            return op.dc(in..., y, dy);
        },
        x);
}

/// What the derivative by input I is computed from, for this op's parameters.
template <int I, class Op>
constexpr Probe probe(const Op& op) {
  constexpr unsigned bits[] = {Probe::kA, Probe::kB, Probe::kC};
  std::array<Probe, Op::inputs> x;
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = Probe(bits[i], true);
  return derivative<I>(op, x, Probe(Probe::kY, true), Probe(Probe::kDy, true));
}
/// The same for any parameters: it depends on what it reads for one of Op::probe(), and is
/// untouched if it is for all.
template <class Op, int I>
constexpr Probe probe() {
  if constexpr (std::is_empty_v<Op>) {
    return probe<I>(Op{});
  } else {
    static_assert(
        requires { Op::probe(); }, "an op with fields needs probe()");
    Probe all(0, true);
    for (const Op& op : Op::probe()) {
      const Probe one = probe<I>(op);
      all = Probe(all.from | one.from, all.untouched && one.untouched);
    }
    return all;
  }
}

/// What the derivative by input I reads: bits of Probe.
template <class Op, int I>
inline constexpr unsigned reads = probe<Op, I>().from;
/// Whether the derivative is dy itself: no kernel runs then.
template <class Op, int I>
inline constexpr bool passes_on = probe<Op, I>().untouched&& reads<Op, I> == Probe::kDy;

}  // namespace formulas
}  // namespace lockstep

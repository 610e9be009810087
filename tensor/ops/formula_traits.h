// The formulas as the host sees them, and what can be found out by looking at one: a derivative is
// evaluated at compile time on a Probe, which remembers what it was computed from, so what an op
// saves for backward needs no declaration and cannot be declared wrongly.
#pragma once

#include <array>

#include <lockstep/tensor/formula.h>

namespace lockstep::formulas {

#define LOCKSTEP_FORMULA constexpr
#include <lockstep/tensor/formulas-inl.h>
#undef LOCKSTEP_FORMULA

using DifferentiableOps = decltype(UnaryOps() + BinaryOps() + NumberOps());

/// A value that knows which of the inputs, the output and dy it was computed from.
struct Probe {
  enum : unsigned { kA = 1, kB = 2, kY = 4, kDy = 8 };
  unsigned from = 0;
  bool untouched = false;  // still the very value it was made as

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
  friend constexpr Probe abs(Probe a) { return both(a, a); }
  friend constexpr Probe sqrt(Probe a) { return both(a, a); }
  friend constexpr Probe exp(Probe a) { return both(a, a); }
  friend constexpr Probe log(Probe a) { return both(a, a); }
  friend constexpr Probe tanh(Probe a) { return both(a, a); }
  friend constexpr Probe erf(Probe a) { return both(a, a); }
  friend constexpr Probe pow(Probe a, Number) { return both(a, a); }
};

/// The derivative by input I, of any op: op.df, op.da or op.db.
template <int I, class Op, class V>
constexpr V derivative(const Op& op, const std::array<V, Op::inputs>& x, const V& y, const V& dy) {
  if constexpr (Op::inputs == 1)
    return op.df(x[0], y, dy);
  else if constexpr (I == 0)
    return op.da(x[0], x[1], y, dy);
  else
    return op.db(x[0], x[1], y, dy);
}

template <class Op, int I>
constexpr Probe probe() {
  Op op{};
  if constexpr (requires { op.exponent; })
    op.exponent = 1.5;  // pow's exponent 0 is a case of its own
  const Probe a(Probe::kA, true), y(Probe::kY, true), dy(Probe::kDy, true);
  if constexpr (Op::inputs == 1)
    return derivative<I>(op, std::array{a}, y, dy);
  else
    return derivative<I>(op, std::array{a, Probe(Probe::kB, true)}, y, dy);
}

/// What the derivative by input I reads: bits of Probe.
template <class Op, int I>
inline constexpr unsigned reads = probe<Op, I>().from;
/// Whether the derivative is dy itself: no kernel runs then.
template <class Op, int I>
inline constexpr bool passes_on = probe<Op, I>().untouched&& reads<Op, I> == Probe::kDy;

}  // namespace lockstep::formulas

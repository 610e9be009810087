// One<T>: a pack of one, the value type of formulas on integers and bool, of comparisons and of totals.
// Integers wrap around where they overflow.
#pragma once

#include <cmath>
#include <type_traits>

#include <lockstep/tensor/formula.h>

namespace lockstep::cpu {

template <class T>
struct One {
  T v;

  explicit One(T v) : v(v) {}
  explicit One(Number n) : v(n.as<T>()) {}

  friend One operator+(One a, One b) { return One(static_cast<T>(wide(a.v) + wide(b.v))); }
  friend One operator-(One a, One b) { return One(static_cast<T>(wide(a.v) - wide(b.v))); }
  friend One operator*(One a, One b) { return One(static_cast<T>(wide(a.v) * wide(b.v))); }
  friend One operator/(One a, One b) { return One(static_cast<T>(a.v / b.v)); }
  friend One sqrt(One a) { return One(static_cast<T>(std::sqrt(a.v))); }
  friend One operator-(One a) { return One(static_cast<T>(wide(T{}) - wide(a.v))); }
  friend bool operator<(One a, One b) { return a.v < b.v; }
  friend bool operator<=(One a, One b) { return a.v <= b.v; }
  friend bool operator>(One a, One b) { return a.v > b.v; }
  friend bool operator>=(One a, One b) { return a.v >= b.v; }
  friend bool operator==(One a, One b) { return a.v == b.v; }
  friend One where(bool m, One a, One b) { return m ? a : b; }
  // NaN where either is.
  friend One max(One a, One b) { return b.v != b.v || a.v < b.v ? b : a; }
  friend One min(One a, One b) { return b.v != b.v || b.v < a.v ? b : a; }
  friend One abs(One a) { return a.v < T{} ? -a : a; }
  /// By squaring; the exponent is whole and not negative.
  friend One pow(One a, Number p) {
    One y(static_cast<T>(1));
    for (int64_t e = p.whole; e > 0; e >>= 1, a = a * a)
      if (e & 1) y = y * a;
    return y;
  }

 private:
  static auto wide(T x) {
    if constexpr (std::is_floating_point_v<T>)
      return x;
    else
      return static_cast<uint64_t>(x);
  }
};

}  // namespace lockstep::cpu

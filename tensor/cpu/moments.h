// Moments of values (count, mean, sum of squared deviations), and the wider type that sums fall
// back to when their own type would overflow or underflow.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace lockstep::cpu {

/// Holds sums and squares of any number of T, the largest and the smallest.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;

/// Whether a sum of n squares or products, computed in T, is free of overflow and of what
/// underflow would take from it.
template <class T>
bool in_range(double sum, int64_t n) {
  const double magnitude = std::abs(sum);
  return magnitude <= std::numeric_limits<double>::max() &&
         magnitude >= static_cast<double>(n) * static_cast<double>(std::numeric_limits<T>::min());
}

/// Whether deviations of this size, their reciprocals and products of a few of them stay clear of
/// the limits of T.
template <class T>
bool is_moderate(Wide<T> spread) {
  constexpr double large = std::is_same_v<T, float> ? 0x1p60 : 0x1p500;
  return !(spread > large || (spread < 1 / large && spread > 0));
}

template <class T>
struct Moments {
  Wide<T> n = 0, mean = 0, m2 = 0;  // m2: the sum of squared deviations from the mean

  /// Those of both sets of values together (Chan, Golub and LeVeque, 1979).
  void combine(const Moments& o) {
    if (o.n == 0) return;
    if (n == 0) return void(*this = o);
    const Wide<T> delta = o.mean - mean, share = o.n / (n + o.n);
    mean += delta * share;
    m2 += o.m2 + delta * delta * (n * share);
    n += o.n;
  }
  /// From sums of x - centre and of (x - centre)^2, of values in the range of T. The first corrects
  /// the second for what rounding took from the centre.
  static Moments about(T centre, int64_t count, double deviations, double squares) {
    const Wide<T> rest = static_cast<Wide<T>>(deviations) / static_cast<Wide<T>>(count);
    return {static_cast<Wide<T>>(count), centre + rest,
            std::max<Wide<T>>(squares - rest * deviations, 0)};
  }
  /// Element by element, for any values and spacing.
  static Moments strided(const T* x, int64_t stride, int64_t count) {
    Moments m{static_cast<Wide<T>>(count), 0, 0};
    for (int64_t i = 0; i < count; ++i) m.mean += x[i * stride];
    m.mean /= m.n;
    Wide<T> deviations = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Wide<T> d = x[i * stride] - m.mean;
      deviations += d;
      m.m2 += d * d;
    }
    m.m2 -= deviations * (deviations / m.n);
    m.mean += deviations / m.n;
    return m;
  }
};

}  // namespace lockstep::cpu

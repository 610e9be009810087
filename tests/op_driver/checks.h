// What the checks of the op driver share: operands made of seeded values, arrays read without the
// library's help, comparison, and finite differences of a reference.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>
#include <random>

#include "../op_check.h"
#include "../ops_cases.h"
#include "row.h"

namespace op_driver {

/// A source of random numbers that depends on `name` alone.
inline std::mt19937 random_of(const std::string& name) {
  std::seed_seq sequence(name.begin(), name.end());
  return std::mt19937(sequence);
}
/// Whether this run includes `name`, a check of a row: with LOCKSTEP_TEST_FRACTION = 1 / k each k-th of
/// them in random order, LOCKSTEP_TEST_SEED = 0 to k - 1 says which.
inline bool is_chosen(const std::string& name) {
  const char* fraction = std::getenv("LOCKSTEP_TEST_FRACTION");
  const char* seed = std::getenv("LOCKSTEP_TEST_SEED");
  const double part = fraction ? std::atof(fraction) : 1;
  REQUIRE_MESSAGE((part > 0 && part <= 1), "LOCKSTEP_TEST_FRACTION is in (0, 1]");
  const auto k = static_cast<uint64_t>(std::lround(1 / part));
  return random_of(name)() % k == (seed ? std::strtoull(seed, nullptr, 10) : 0) % k;
}

inline Array read(const Tensor& t) {
  Array a(t.shape());
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    cases::for_each_element(t, [&](int64_t i, char* p) {
      const T v = *reinterpret_cast<T*>(p);
      if constexpr (std::is_integral_v<T>)
        a.v[static_cast<size_t>(i)] = v;
      else
        a.v[static_cast<size_t>(i)] = static_cast<double>(v);
    });
  });
  return a;
}
inline Arrays read(const Tensors& tensors) {
  Arrays arrays;
  for (const Tensor& t : tensors) arrays.push_back(read(t));
  return arrays;
}
inline void write(const Tensor& t, const std::vector<Real>& v) {
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    cases::for_each_element(t, [&](int64_t i, char* p) {
      const Real value = v[static_cast<size_t>(i)];
      if constexpr (std::is_integral_v<T>)
        *reinterpret_cast<T*>(p) = static_cast<T>(value);
      else
        *reinterpret_cast<T*>(p) = static_cast<T>(static_cast<double>(value));
    });
  });
}

/// Values for an operand: of integers small ones; floats all differ, by enough for differences.
inline std::vector<Real> values_for(const Operand& o, DType t, int64_t n, std::mt19937& random) {
  std::vector<Real> v(static_cast<size_t>(n));
  const bool whole = o.kind == Operand::Kind::index;
  if (t == DType::boolean) {
    for (Real& x : v) x = random() % 2;
  } else if (whole || !is_floating(t)) {
    const double low = whole || t != DType::u8 ? o.low : std::max(0.0, o.low);
    const double high = whole ? o.high : std::max(o.high, 3.0);
    for (Real& x : v)
      x = std::floor(low + (high - low) * (static_cast<double>(random()) * 0x1p-32));
  } else {
    std::iota(v.begin(), v.end(), Real(0));
    std::shuffle(v.begin(), v.end(), random);
    const Real shift = (random() % 8 + 0.5L) / 8;  // two operands share no value
    // Not evenly spaced: else one of an odd number of values is their mean, up to rounding.
    for (Real& x : v) {
      const Real jitter = static_cast<Real>(random() % 1024) / 4096;
      x = o.low + (o.high - o.low) * (x + shift * 0.75L + jitter) / static_cast<Real>(n);
    }
  }
  return v;
}

inline DType dtype_for(const Operand& o, DType t) {
  if (o.kind == Operand::Kind::index) return DType::i64;
  return o.kind == Operand::Kind::flag ? DType::boolean : t;
}

/// Every operand of a row in every layout: contiguous first, then one after the other.
struct Arrangement {
  std::string name;
  Tensors x;
};
inline std::vector<Arrangement> arrangements(const Row& row, const Shapes& shapes, DType t,
                                             std::mt19937& random) {
  std::vector<Arrangement> all;
  std::vector<std::vector<op_check::Layout>> choices;
  size_t most = 1;
  for (size_t k = 0; k < shapes.size(); ++k) {
    const DType dtype = dtype_for(row.operand(k), t);
    choices.push_back(
        op_check::layouts(shapes[k], [&](const Shape& s) { return empty(s, {.dtype = dtype}); }));
    most = std::max(most, choices.back().size());
  }
  // All alike, and then shifted against each other.
  for (size_t shift = 0; shift < (shapes.size() > 1 ? 2u : 1u); ++shift)
    for (size_t i = 0; i < most; ++i) {
      Arrangement a;
      for (size_t k = 0; k < choices.size(); ++k) {
        const op_check::Layout& layout = choices[k][(i + k * shift) % choices[k].size()];
        a.name += (k ? " and " : "") + layout.name;
        a.x.push_back(layout.x);
      }
      for (size_t k = 0; k < a.x.size(); ++k)
        write(a.x[k], values_for(row.operand(k), a.x[k].dtype(), a.x[k].numel(), random));
      all.push_back(std::move(a));
    }
  return all;
}
inline Tensors contiguous_operands(const Row& row, const Shapes& shapes, DType t,
                                   std::mt19937& random) {
  Tensors x;
  for (size_t k = 0; k < shapes.size(); ++k) {
    x.push_back(empty(shapes[k], {.dtype = dtype_for(row.operand(k), t)}));
    write(x[k], values_for(row.operand(k), x[k].dtype(), x[k].numel(), random));
  }
  return x;
}

/// What the reference says, or nothing where it refuses the inputs.
inline std::optional<Array> expected(const Row& row, const Arrays& x) {
  try {
    return row.reference(x);
  } catch (const Refused&) {
    return {};
  }
}

/// A value as an element of dtype t would hold it.
inline Real rounded(Real v, DType t) {
  switch (t) {
    case DType::f32:
      return static_cast<float>(v);
    case DType::f64:
      return static_cast<double>(v);
    case DType::f16:
      return static_cast<double>(Half(static_cast<double>(v)));
    case DType::bf16:
      return static_cast<double>(BFloat16(static_cast<double>(v)));
    case DType::u8:  // integers wrap around; those of i64 are kept within its range
      return static_cast<uint8_t>(static_cast<int64_t>(v));
    case DType::i8:
      return static_cast<int8_t>(static_cast<int64_t>(v));
    case DType::i16:
      return static_cast<int16_t>(static_cast<int64_t>(v));
    case DType::i32:
      return static_cast<int32_t>(static_cast<int64_t>(v));
    default:
      return v;
  }
}
/// f16 and bf16: a unit in the last place, since the exact result is rounded before it is compared.
inline double tolerance_of(DType t) {
  return t == DType::f32    ? 2e-6
         : t == DType::f64  ? 1e-12
         : t == DType::f16  ? 0x1p-10
         : t == DType::bf16 ? 0x1p-7
                            : 0;
}

/// The largest finite magnitude, at least 1: what elements of a result are compared relative to.
inline Real largest(const std::vector<Real>& v) {
  Real most = 1;
  for (Real x : v)
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  return most;
}
/// NaN for NaN, infinity for infinity, and finite values within tolerance * (scale + |want|).
inline bool agree(Real got, Real want, double tolerance, Real scale = 1) {
  if (std::isnan(want)) return std::isnan(got);
  if (got == want) return true;
  return std::isfinite(want) && std::fabs(got - want) <= tolerance * (scale + std::fabs(want));
}
/// The first element that does not agree is a failure.
inline void check_agree(const std::string& what, const Tensor& got, const Array& want,
                        double tolerance, Real scale = 1) {
  if (got.shape() != want.shape) {
    FAIL_CHECK(what << ": shape " << str_cat(got.shape(), ", expected ", want.shape));
    return;
  }
  const Array values = read(got);
  for (size_t i = 0; i < want.v.size(); ++i)
    if (const Real w = rounded(want.v[i], got.dtype()); !agree(values.v[i], w, tolerance, scale)) {
      FAIL_CHECK(what << ": element " << i << " is " << static_cast<double>(values.v[i])
                      << ", expected " << static_cast<double>(w));
      return;
    }
}

// ---- derivatives of a reference ----

/// Moves along a direction and back: x + step * direction.
inline Arrays moved(Arrays x, const Arrays& direction, Real step) {
  for (size_t k = 0; k < x.size(); ++k)
    for (size_t i = 0; i < direction[k].v.size(); ++i) x[k].v[i] += step * direction[k].v[i];
  return x;
}
inline Real dot(const Array& a, const Array& b) {
  Real s = 0;
  for (size_t i = 0; i < a.v.size(); ++i) s += a.v[i] * b.v[i];
  return s;
}
/// The five-point difference of f at 0.
template <class F>
auto slope(F f) {
  constexpr Real h = 1e-4L;
  return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
}
/// f's slope by each element of x's operand k.
template <class F>
Array slopes(const Arrays& x, size_t k, F f) {
  Array result(x[k].shape);
  for (size_t i = 0; i < result.v.size(); ++i)
    result.v[i] = slope([&](Real step) {
      Arrays at = x;
      at[k].v[i] += step;
      return f(at);
    });
  return result;
}

}  // namespace op_driver

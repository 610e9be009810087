// What the element-wise formulas (formulas-inl.h) depend on: lists of ops, the dtypes of an op, and
// Number, a scalar parameter. Includes little beside the standard library, so that a CUDA kernel can
// include the formulas.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <lockstep/tensor/precision.h>

namespace lockstep {

/// A list of op types.
template <class... Ops>
struct List {};
template <class... A, class... B>
List<A..., B...> operator+(List<A...>, List<B...>) {
  return {};
}

/// The dtypes that a formula computes in. A `floats` op converts integers to f32 first.
enum class Domain : uint8_t {
  any,      // every dtype
  numbers,  // all but bool
  floats,
};

/// A scalar operand or parameter: a float, an integer of 64 bits, or a bool. The kind decides
/// promotion: a float turns an integer tensor into f32, an integer does not; an integer turns a
/// bool tensor into i64, a bool does not. An unsigned integer above the range of int64_t is a
/// float.
struct Number {
  double value = 0;
  int64_t whole = 0;     // if is_whole
  bool is_whole = true;  // made from an integer or a bool
  bool is_bool = false;

  constexpr Number() = default;
  template <class T>
  requires std::is_arithmetic_v<T>
  constexpr Number(T v)  // NOLINT: implicit, so that x + 2 and pow(x, 0.5) read as they should
      : value(static_cast<double>(v)),
        is_whole(std::is_integral_v<T>),
        is_bool(std::is_same_v<T, bool>) {
    if constexpr (std::is_integral_v<T>) {
      is_whole = v < T(0) || static_cast<uint64_t>(v) <= uint64_t{INT64_MAX};
      if (is_whole) whole = static_cast<int64_t>(v);
    }
  }

  /// As a T, rounded once. A fraction must be in T's range.
  template <class T>
  constexpr T as() const {
    return is_whole ? static_cast<T>(whole) : static_cast<T>(value);
  }
};

/// The ends of T's values, infinite for floats: what a maximum and a minimum over nothing are.
template <class T>
constexpr T lowest() {
  using L = std::numeric_limits<T>;
  return L::has_infinity ? -L::infinity() : L::lowest();
}
template <class T>
constexpr T highest() {
  using L = std::numeric_limits<T>;
  return L::has_infinity ? L::infinity() : L::max();
}

}  // namespace lockstep

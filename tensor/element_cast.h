// cast_element: one element from any dtype to any other, defined for every value.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include <lockstep/tensor/dtype.h>

namespace lockstep {

namespace detail {
/// The integer part; beyond the range its nearest end, and 0 for NaN.
template <class To, class From>
constexpr To integer_part(From v) {
  using L = std::numeric_limits<To>;
  // Both ends are 0 or powers of two, and so exact.
  constexpr From low = static_cast<From>(L::min()), end = static_cast<From>(L::max() / 2 + 1) * 2;
  if (v >= low && v < end) return static_cast<To>(v);
  if (v != v) return 0;
  return v < 0 ? L::min() : L::max();
}
}  // namespace detail

/// To bool: whether it differs from 0. A float to i64, i32 and C++'s other integers: without its
/// fraction; outside the range the nearest integer of the range; NaN gives 0. To u8: by way of i64,
/// modulo 256. Integers to narrower ones: modulo their range. To f16 and bf16: to nearest, ties to
/// even, rounded once from any dtype. Otherwise as C++ converts.
template <class To, class From>
To cast_element(From v) {
  if constexpr (std::is_same_v<To, From>)
    return v;
  else if constexpr (detail::is_two_byte_float<From> && !detail::is_two_byte_float<To>)
    return cast_element<To>(static_cast<float>(v));
  else if constexpr (std::is_same_v<To, bool>)
    return v != From{};
  else if constexpr (std::is_same_v<To, uint8_t> && std::is_floating_point_v<From>)
    return static_cast<uint8_t>(detail::integer_part<int64_t>(v));
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>)
    return detail::integer_part<To>(v);
  else
    return static_cast<To>(v);
}

}  // namespace lockstep

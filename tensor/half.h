// Half and BFloat16: the two-byte floats as bits, with their conversions. They are stored and sent,
// not computed with: kernels widen to float, compute, and round once, to nearest with ties to even.
// static_cast goes between them and every arithmetic type; doubles and integers round once too.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace lockstep {

namespace detail {

/// The float at or next to the value; where neither float beside it is exact, the one whose last
/// bit is 1. Rounding that to fewer than 23 bits gives what rounding the value itself does (Boldo
/// and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
/// odd", 2008).
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (nearest == value || value != value || (bits & 1) != 0) return nearest;
  const bool below = (nearest < 0 ? -nearest : nearest) < (value < 0 ? -value : value);
  return std::bit_cast<float>(below ? bits + 1 : bits - 1);
}
inline float round_to_odd(int64_t value) {
  // So that a double is exact: the last 16 of more than 48 bits become one, odd if any is set.
  if (value >> 48 != 0 && value >> 48 != -1)
    value = (value & ~int64_t{0xFFFF}) | ((value & 0xFFFF) != 0 ? 0x10000 : 0);
  return round_to_odd(static_cast<double>(value));
}
inline float round_to_odd(uint64_t value) {
  if (value <= INT64_MAX) return round_to_odd(static_cast<int64_t>(value));
  return 2 * round_to_odd(static_cast<int64_t>(value >> 1 | (value & 1)));
}

}  // namespace detail

struct BFloat16;

/// IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits; largest 65504.
struct Half {
  uint16_t bits = 0;

  Half() = default;
  explicit Half(float value) : bits(round(std::bit_cast<uint32_t>(value))) {}
  explicit Half(double value) : Half(detail::round_to_odd(value)) {}
  template <std::integral T>
  explicit Half(T value)
      : Half(detail::round_to_odd(
            static_cast<std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t>>(value))) {}
  inline explicit Half(BFloat16 value);

  template <class T>
  requires std::is_arithmetic_v<T>
  explicit operator T() const { return static_cast<T>(std::bit_cast<float>(widen(bits))); }

 private:
  static uint16_t round(uint32_t x) {
    const uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)  // NaN stays NaN, quiet, with the upper bits of its payload
      return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x1FF));
    if (magnitude >= 0x477FF000)  // from halfway between 65504 and 65536
      return static_cast<uint16_t>(sign | 0x7C00);
    if (magnitude < 0x38800000) {  // below the smallest normal, 2^-14: multiples of 2^-24
      // Added to 0.5 the value's bits below 2^-24 are rounded off by the float unit itself.
      const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3F000000));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return static_cast<uint16_t>(sign | ((magnitude + 0xC8000FFF + odd) >> 13));
  }
  static uint32_t widen(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7FFF;
    if (rest >= 0x7C00) return sign | 0x7F800000 | (rest & 0x3FF) << 13;
    if (rest >= 0x0400) return sign | ((rest << 13) + 0x38000000);
    return sign | std::bit_cast<uint32_t>(static_cast<float>(rest) * 0x1p-24f);
  }
};

/// The upper half of a float: its range, with 7 fraction bits.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) : bits(round(std::bit_cast<uint32_t>(value))) {}
  explicit BFloat16(double value) : BFloat16(detail::round_to_odd(value)) {}
  template <std::integral T>
  explicit BFloat16(T value)
      : BFloat16(detail::round_to_odd(
            static_cast<std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t>>(value))) {}
  explicit BFloat16(Half value) : BFloat16(static_cast<float>(value)) {}

  template <class T>
  requires std::is_arithmetic_v<T>
  explicit operator T() const {
    return static_cast<T>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  }

 private:
  static uint16_t round(uint32_t x) {
    if ((x & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(x >> 16 | 0x40);
    return static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
  }
};

Half::Half(BFloat16 value) : Half(static_cast<float>(value)) {}

}  // namespace lockstep

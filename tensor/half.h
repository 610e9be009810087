// Half and BFloat16: the two-byte floats as bits, with their conversions. They are stored and sent,
// not computed with: kernels widen to float, compute, and round once, to nearest with ties to even.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep {

/// IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits; largest 65504.
struct Half {
  uint16_t bits = 0;

  Half() = default;
  explicit Half(float value) : bits(round(std::bit_cast<uint32_t>(value))) {}
  explicit operator float() const { return std::bit_cast<float>(widen(bits)); }

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
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

 private:
  static uint16_t round(uint32_t x) {
    if ((x & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(x >> 16 | 0x40);
    return static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
  }
};

}  // namespace lockstep

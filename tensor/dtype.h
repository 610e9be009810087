// DType: the type of a tensor's elements. Ops compute in f32, f64, i64, i32, u8 and bool; tensors
// of f16 and bf16 can be created, stored, sent, copied and converted, and other ops throw
// DTypeError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/half.h>

namespace lockstep {

enum class DType : uint8_t { f32, f64, f16, bf16, i64, i32, u8, boolean };

constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

/// "f32", "f64", "f16", "bf16", "i64", "i32", "u8", "bool".
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"f32", "f64", "f16", "bf16", "i64", "i32", "u8", "bool"};
  return names[static_cast<int>(t)];
}
inline void append(std::string& text, DType t) { text += name_of(t); }
/// Writes the name; a template so that this header needs no <ostream>.
template <class Stream>
auto operator<<(Stream& out, DType t) -> decltype(out << std::string()) {
  return out << name_of(t);
}

constexpr bool is_floating(DType t) { return t <= DType::bf16; }

/// The DType of a C++ element type.
template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, double>)
    return DType::f64;
  else if constexpr (std::is_same_v<T, Half>)
    return DType::f16;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return DType::bf16;
  else if constexpr (std::is_same_v<T, int64_t>)
    return DType::i64;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::i32;
  else if constexpr (std::is_same_v<T, uint8_t>)
    return DType::u8;
  else {
    static_assert(std::is_same_v<T, bool>,
                  "elements are float, double, Half, BFloat16, int64_t, int32_t, uint8_t or bool");
    return DType::boolean;
  }
}

/// PyTorch's promotion of two tensors: the wider of one kind; a float with an integer is the float.
constexpr DType promote(DType a, DType b) {
  if (a == b) return a;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  if (is_floating(a)) {
    if (a == DType::f64 || b == DType::f64) return DType::f64;
    return DType::f32;  // f16 with bf16 as well
  }
  auto rank = [](DType t) {
    return t == DType::boolean ? 0 : t == DType::u8 ? 1 : t == DType::i32 ? 2 : 3;
  };
  return rank(a) > rank(b) ? a : b;
}

/// Bits of the fraction of a floating type, its leading 1 included: whole numbers up to 2 to this power
/// are exact.
template <class T>
inline constexpr int fraction_bits = std::is_same_v<T, double>  ? 53
                                     : std::is_same_v<T, float> ? 24
                                     : std::is_same_v<T, Half>  ? 11
                                                                : 8;

template <class T>
struct TypeTag {
  using type = T;
};

/// Calls f(TypeTag<T>()) with the element type of `t`; throws a DTypeError that names `op` for f16
/// and bf16.
template <class F>
decltype(auto) dispatch(std::string_view op, DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f(TypeTag<float>());
    case DType::f64:
      return f(TypeTag<double>());
    case DType::i64:
      return f(TypeTag<int64_t>());
    case DType::i32:
      return f(TypeTag<int32_t>());
    case DType::u8:
      return f(TypeTag<uint8_t>());
    case DType::boolean:
      return f(TypeTag<bool>());
    default:
      fail<DTypeError>(op, ": ", t, " has no kernels yet; convert with to(DType::f32)");
  }
}

/// The same for every dtype, f16 and bf16 too: for code that moves or converts elements.
template <class F>
decltype(auto) dispatch_any(DType t, F&& f) {
  if (t == DType::f16) return f(TypeTag<Half>());
  if (t == DType::bf16) return f(TypeTag<BFloat16>());
  return dispatch("dispatch_any", t, std::forward<F>(f));
}

/// The same for f32 and f64 only.
template <class F>
decltype(auto) dispatch_floating(std::string_view op, DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f(TypeTag<float>());
    case DType::f64:
      return f(TypeTag<double>());
    default:
      fail<DTypeError>(op, ": needs a tensor of f32 or f64, got ", t,
                       "; convert with to(DType::f32)");
  }
}

}  // namespace lockstep

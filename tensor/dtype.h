// DType: the type of a tensor's elements. A dtype is a row of LOCKSTEP_DTYPES; all else that is known of it
// follows from the row. Ops compute f16 and bf16 in f32 and round once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/half.h>

namespace lockstep {

/// ROW(enumerator, C++ type, name, name in safetensors files); floating dtypes first.
#define LOCKSTEP_DTYPES(ROW)             \
  ROW(f32, float, "f32", "F32")          \
  ROW(f64, double, "f64", "F64")         \
  ROW(f16, Half, "f16", "F16")           \
  ROW(bf16, BFloat16, "bf16", "BF16")    \
  ROW(i64, int64_t, "i64", "I64")        \
  ROW(i32, int32_t, "i32", "I32")        \
  ROW(i16, int16_t, "i16", "I16")        \
  ROW(i8, int8_t, "i8", "I8")            \
  ROW(u8, uint8_t, "u8", "U8")           \
  ROW(boolean, bool, "bool", "BOOL")

enum class DType : uint8_t {
#define LOCKSTEP_ROW(dtype, T, name, file_name) dtype,
  LOCKSTEP_DTYPES(LOCKSTEP_ROW)
#undef LOCKSTEP_ROW
};

namespace detail {
struct DTypeRow {
  DType dtype;
  size_t size;
  bool is_floating, is_signed;
  std::string_view name, file_name;
};
template <class T>
inline constexpr bool is_two_byte_float = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;
inline constexpr DTypeRow dtype_rows[] = {
#define LOCKSTEP_ROW(dtype, T, name, file_name)                                        \
  {DType::dtype, sizeof(T), std::is_floating_point_v<T> || is_two_byte_float<T>,       \
   std::is_signed_v<T>, name, file_name},
    LOCKSTEP_DTYPES(LOCKSTEP_ROW)
#undef LOCKSTEP_ROW
};
constexpr const DTypeRow& row_of(DType t) { return dtype_rows[static_cast<int>(t)]; }
}  // namespace detail

/// How many dtypes there are; their numbers are 0 .. kDTypeCount - 1.
inline constexpr int kDTypeCount = static_cast<int>(std::size(detail::dtype_rows));

/// Bytes of an element.
constexpr size_t size_of(DType t) { return detail::row_of(t).size; }
/// "f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool".
constexpr std::string_view name_of(DType t) { return detail::row_of(t).name; }
constexpr bool is_floating(DType t) { return detail::row_of(t).is_floating; }

inline void append(std::string& text, DType t) { text += name_of(t); }
/// Writes the name; a template so that this header needs no <ostream>.
template <class Stream>
auto operator<<(Stream& out, DType t) -> decltype(out << std::string()) {
  return out << name_of(t);
}

/// The DType of a C++ element type.
template <class T>
constexpr DType dtype_of() {
#define LOCKSTEP_ROW(dtype, Type, name, file_name) \
  if constexpr (std::is_same_v<T, Type>) return DType::dtype;
  LOCKSTEP_DTYPES(LOCKSTEP_ROW)
#undef LOCKSTEP_ROW
#define LOCKSTEP_ROW(dtype, Type, name, file_name) || std::is_same_v<T, Type>
  static_assert(false LOCKSTEP_DTYPES(LOCKSTEP_ROW),
                "elements are float, double, Half, BFloat16, bool or an integer type of DType");
#undef LOCKSTEP_ROW
}

/// PyTorch's promotion of two tensors: the wider of one kind; a float with an integer is the float; an
/// unsigned with a signed integer a signed one that holds both.
constexpr DType promote(DType a, DType b) {
  if (a == b) return a;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  if (is_floating(a)) {
    if (a == DType::f64 || b == DType::f64) return DType::f64;
    return DType::f32;  // f16 with bf16 as well
  }
  if (a == DType::boolean || b == DType::boolean) return a == DType::boolean ? b : a;
  const detail::DTypeRow &x = detail::row_of(a), &y = detail::row_of(b);
  if (x.is_signed == y.is_signed || x.size != y.size) {
    const bool first = x.size > y.size;
    if (x.is_signed == y.is_signed || (first ? x : y).is_signed) return first ? a : b;
  }
  // The signed one is not wider: the next signed dtype is.
  for (const detail::DTypeRow& row : detail::dtype_rows)
    if (!row.is_floating && row.is_signed && row.size == 2 * std::max(x.size, y.size))
      return row.dtype;
  return DType::i64;
}

/// f16 and bf16.
constexpr bool is_half(DType t) { return t == DType::f16 || t == DType::bf16; }
/// The dtype in which a floating dtype is computed: f32 for f16 and bf16, else itself.
constexpr DType compute_dtype(DType t) { return is_half(t) ? DType::f32 : t; }

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

/// Calls f(TypeTag<T>()) with the element type of `t`: for code that moves or converts elements.
template <class F>
decltype(auto) dispatch_any(DType t, F&& f) {
  switch (t) {
#define LOCKSTEP_ROW(dtype, T, name, file_name) \
  case DType::dtype:                            \
    return f(TypeTag<T>());
    LOCKSTEP_DTYPES(LOCKSTEP_ROW)
#undef LOCKSTEP_ROW
  }
  fail("dispatch_any: there is no dtype ", static_cast<int>(t));
}

/// The same for the types that are computed in, which are all but Half and BFloat16; throws a DTypeError
/// that names `op` for these.
template <class F>
decltype(auto) dispatch(std::string_view op, DType t, F&& f) {
  switch (t) {
#define LOCKSTEP_ROW(dtype, T, name, file_name)           \
  case DType::dtype:                                      \
    if constexpr (detail::is_two_byte_float<T>)           \
      break;                                              \
    else                                                  \
      return f(TypeTag<T>());
    LOCKSTEP_DTYPES(LOCKSTEP_ROW)
#undef LOCKSTEP_ROW
  }
  fail<DTypeError>(op, ": ", t, " has no kernels yet; convert with to(DType::f32)");
}

/// The same for f32 and f64, in which all floating dtypes are computed.
template <class F>
decltype(auto) dispatch_floating(std::string_view op, DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f(TypeTag<float>());
    case DType::f64:
      return f(TypeTag<double>());
    default:
      fail<DTypeError>(op, ": needs a floating tensor, got ", t, "; convert with to(DType::f32)");
  }
}

}  // namespace lockstep

// What LOCKSTEP_MODULE makes of a module's fields: a visit that names each parameter, buffer and
// module in them, one level deep. Everything else that a module can do derives from this visit.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <lockstep/nn/parameter.h>

namespace lockstep::nn {

class Module;

/// Told of each field of a module, and of the parts inside it. An element of a list is named
/// "blocks.0".
class LOCKSTEP_API FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void parameter(const std::string& name, Parameter& p) = 0;
  virtual void buffer(const std::string& name, Buffer& b) = 0;
  virtual void module(const std::string& name, Module& m) = 0;
  /// The field as a whole, before its parts.
  virtual void field(const std::string& /*name*/, const void* /*at*/, size_t /*size*/,
                     size_t /*alignment*/) {}
};

namespace detail {

template <class T>
inline constexpr bool is_part =
    std::is_base_of_v<Module, T> || std::is_same_v<T, Parameter> || std::is_same_v<T, Buffer>;

// How a field holds parts: as itself, by optional, by owning pointer, as a list; or not at all (a
// plain value).
enum class Holder { none, part, optional, pointer, list };
template <class T>
inline constexpr Holder holder = is_part<T> ? Holder::part : Holder::none;
template <class T>
inline constexpr Holder holder<std::optional<T>> =
    holder<T> == Holder::none ? Holder::none : Holder::optional;
template <class T>
inline constexpr Holder holder<std::unique_ptr<T>> = is_part<T> ? Holder::pointer : Holder::none;
template <class T>
inline constexpr Holder holder<std::vector<T>> =
    holder<T> == Holder::none ? Holder::none : Holder::list;
template <class T, size_t n>
inline constexpr Holder holder<std::array<T, n>> =
    holder<T> == Holder::none ? Holder::none : Holder::list;

template <class T>
inline constexpr bool is_unknown_holder = false;
template <class T>
requires requires { typename T::element_type; } || requires {
  typename T::mapped_type;
}
inline constexpr bool is_unknown_holder<T> = [] {
  if constexpr (requires { typename T::mapped_type; })
    return holder<typename T::mapped_type> != Holder::none;
  else
    return is_part<typename T::element_type>;
}();

template <class T>
void visit_field(FieldVisitor& v, const std::string& name, T& field) {
  if constexpr (std::is_base_of_v<Module, T>) {
    v.module(name, field);
  } else if constexpr (std::is_same_v<T, Parameter>) {
    v.parameter(name, field);
  } else if constexpr (std::is_same_v<T, Buffer>) {
    v.buffer(name, field);
  } else if constexpr (holder<T> == Holder::optional || holder<T> == Holder::pointer) {
    if (field) visit_field(v, name, *field);
  } else if constexpr (holder<T> == Holder::list) {
    for (size_t i = 0; i < field.size(); ++i)
      visit_field(v, name + "." + std::to_string(i), field[i]);
  } else {
    static_assert(std::is_copy_constructible_v<T> && !is_unknown_holder<T>,
                  "LOCKSTEP_MODULE takes modules, parameters, buffers, std::optional, std::vector "
                  "and std::array of them, std::unique_ptr to a module, and plain values that can "
                  "be copied");
  }
}

/// Cuts the first name off "conv1, conv2, fc1".
LOCKSTEP_API std::string next_field_name(std::string_view& names);

template <class T>
void visit_next(FieldVisitor& v, std::string_view& names, T& field) {
  const std::string name = next_field_name(names);
  v.field(name, &field, sizeof(T), alignof(T));
  visit_field(v, name, field);
}
template <class... Fields>
void visit_fields([[maybe_unused]] FieldVisitor& v, [[maybe_unused]] std::string_view names,
                  Fields&... fields) {
  (visit_next(v, names, fields), ...);
}

}  // namespace detail
}  // namespace lockstep::nn

// What LOCKSTEP_MODULE generates from a module's fields: a visitor that names each parameter,
// buffer and module in them, one level deep. Everything else that a module can do derives from it.
// What a field of a given type holds is decided at compile time; a type that would hide tensors or
// modules from the visitor is refused.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <lockstep/nn/parameter.h>

namespace lockstep::nn {

class Module;

/// A list of modules that are named by position alone, "0.weight", not by the field: what
/// Sequential is made of. A class that extends Sequential names it, `modules`, in its
/// LOCKSTEP_MODULE.
struct PositionalModules : std::vector<std::unique_ptr<Module>>,
                           private detail::Registered<detail::Part::list> {
  PositionalModules() = default;
  PositionalModules(PositionalModules&&) = default;
  PositionalModules& operator=(PositionalModules&&) = default;
};

/// Called for each field of a module and for each parameter, buffer and module in it. An element of
/// a list is named "blocks.0".
class LOCKSTEP_API FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void parameter(const std::string& name, Parameter& p) = 0;
  virtual void buffer(const std::string& name, Buffer& b) = 0;
  virtual void module(const std::string& name, Module& m) = 0;
  /// A part that belongs to another module: it is neither trained, moved nor saved with this one.
  /// `module` is the part, if it is a module.
  virtual void reference(const void* /*part*/, Module* /*module*/) {}
  /// A list that names its modules itself, before they are visited.
  virtual void list(const PositionalModules& /*list*/) {}
  /// The field as a whole, before its parts.
  virtual void field(const std::string& /*name*/, const void* /*at*/, size_t /*size*/,
                     size_t /*alignment*/) {}
};

namespace detail {

template <class T>
inline constexpr bool is_part =
    std::is_base_of_v<Module, T> || std::is_same_v<T, Parameter> || std::is_same_v<T, Buffer>;

// How a field holds parts: as itself, by optional, by owning pointer, as a list, by reference
// without owning; or not at all (a plain value).
enum class Holder { none, part, optional, pointer, list, reference };
template <class T>
inline constexpr Holder holder = is_part<T> ? Holder::part : Holder::none;
template <class T>
inline constexpr Holder holder<std::optional<T>> =
    holder<T> == Holder::none ? Holder::none : Holder::optional;
template <class T>
inline constexpr Holder holder<std::unique_ptr<T>> = is_part<T> ? Holder::pointer : Holder::none;
template <class T>
inline constexpr Holder holder<std::shared_ptr<T>> = is_part<T> ? Holder::pointer : Holder::none;
template <class T>
inline constexpr Holder holder<std::reference_wrapper<T>> =
    is_part<T> ? Holder::reference : Holder::none;
template <>
inline constexpr Holder holder<PositionalModules> = Holder::list;
template <class T>
inline constexpr Holder holder<std::vector<T>> =
    holder<T> == Holder::none ? Holder::none : Holder::list;
template <class T, size_t n>
inline constexpr Holder holder<std::array<T, n>> =
    holder<T> == Holder::none ? Holder::none : Holder::list;

/// Whether a T holds or points to a tensor or a module, however deep.
template <class T>
consteval bool leads_to_part() {
  using U = std::remove_cvref_t<T>;
  if constexpr (!requires { sizeof(U); })
    return false;  // an incomplete type, or void
  else if constexpr (std::is_base_of_v<Module, U> || std::is_base_of_v<Tensor, U>)
    return true;
  else if constexpr (std::is_pointer_v<U> || std::is_array_v<U>)
    return leads_to_part<std::remove_all_extents_t<std::remove_pointer_t<U>>>();
  else if constexpr (requires { typename U::mapped_type; })
    return leads_to_part<typename U::mapped_type>();
  else if constexpr (requires { typename U::element_type; })
    return leads_to_part<typename U::element_type>();
  else if constexpr (requires { typename U::value_type; })
    return !std::is_same_v<typename U::value_type, U> && leads_to_part<typename U::value_type>();
  else if constexpr (requires { std::tuple_size<U>::value; })
    return []<size_t... i>(std::index_sequence<i...>) {
      return (leads_to_part<std::tuple_element_t<i, U>>() || ...);
    }(std::make_index_sequence<std::tuple_size_v<U>>());
  else if constexpr (requires { std::variant_size<U>::value; })
    return []<size_t... i>(std::index_sequence<i...>) {
      return (leads_to_part<std::variant_alternative_t<i, U>>() || ...);
    }(std::make_index_sequence<std::variant_size_v<U>>());
  else
    return false;
}

template <class T>
void visit_field(FieldVisitor& v, const std::string& name, T& field) {
  if constexpr (std::is_base_of_v<Module, T>) {
    v.module(name, field);
  } else if constexpr (std::is_same_v<T, Parameter>) {
    v.parameter(name, field);
  } else if constexpr (std::is_same_v<T, Buffer>) {
    v.buffer(name, field);
  } else if constexpr (holder<T> == Holder::reference) {
    if constexpr (std::is_base_of_v<Module, std::remove_cvref_t<decltype(field.get())>>)
      v.reference(&field.get(), &field.get());
    else
      v.reference(&field.get(), nullptr);
  } else if constexpr (holder<T> == Holder::optional || holder<T> == Holder::pointer) {
    if (field) visit_field(v, name, *field);
  } else if constexpr (std::is_same_v<T, PositionalModules>) {
    v.list(field);
    for (size_t i = 0; i < field.size(); ++i) visit_field(v, std::to_string(i), field[i]);
  } else if constexpr (holder<T> == Holder::list) {
    for (size_t i = 0; i < field.size(); ++i)
      visit_field(v, name + "." + std::to_string(i), field[i]);
  } else {
    static_assert(!std::is_same_v<std::remove_cv_t<T>, Tensor>,
                  "a plain Tensor is named in LOCKSTEP_MODULE: make it an nn::Parameter, which is "
                  "trained, or an nn::Buffer, which is not");
    static_assert(!std::is_pointer_v<T> || !leads_to_part<T>(),
                  "a raw pointer is named in LOCKSTEP_MODULE: make it a std::unique_ptr or "
                  "std::shared_ptr to a module that this one owns, a std::reference_wrapper to "
                  "one that another object owns");
    static_assert(std::is_copy_constructible_v<T> && !leads_to_part<T>(),
                  "LOCKSTEP_MODULE takes modules, parameters and buffers; std::optional, "
                  "std::vector and std::array of them; std::unique_ptr, std::shared_ptr and "
                  "std::reference_wrapper to them; and plain values that can be copied");
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

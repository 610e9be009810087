// clone() (new tensors) and share() (the same tensors) for classes without a copy constructor.
//
// Implemented by moving the module into the copy, plain values included, then moving each named
// field back into the original and putting a clone of it into the copy. Fields that hold more than
// a plain value must be named in LOCKSTEP_MODULE, which is checked first. Not safe while another
// thread uses the module otherwise, since its fields are empty meanwhile; that is why neither is
// const. Concurrent clones wait for each other.
#pragma once

#include <utility>

#include <lockstep/nn/call.h>
#include <lockstep/nn/fields.h>

namespace lockstep::nn {

/// Maps each tensor to its copy, so that tied parameters stay tied. Holds a process-wide lock while
/// it lives: clones on other threads wait.
class LOCKSTEP_API CloneMap {
 public:
  /// `share`: every tensor maps to itself.
  explicit CloneMap(bool share);
  ~CloneMap();
  CloneMap(const CloneMap&) = delete;
  CloneMap& operator=(const CloneMap&) = delete;
  Tensor operator()(const Tensor& t);

 private:
  bool share_;
  std::vector<std::pair<Tensor, Tensor>> made_;
};

namespace detail {

/// Throws unless the named fields cover the whole module; `op` is the caller's name.
LOCKSTEP_API void check_all_fields_named(Module& module, const char* op);

template <class T>
T clone_field(T& field, CloneMap& map) {
  if constexpr (std::is_base_of_v<Module, T>) {
    return field.clone_with(map);
  } else if constexpr (std::is_base_of_v<Tensor, T>) {
    T copy = field;
    static_cast<Tensor&>(copy) = map(field);
    return copy;
  } else if constexpr (holder<T> == Holder::optional) {
    return field ? T(clone_field(*field, map)) : T();
  } else if constexpr (holder<T> == Holder::pointer) {
    using Element = typename T::element_type;
    if (!field) return T();
    if constexpr (std::is_base_of_v<Module, Element>)
      return T(static_cast<Element*>(field->clone_any(map).release()));
    else
      return T(new Element(clone_field(*field, map)));
  } else if constexpr (holder<T> == Holder::list) {
    if constexpr (requires { field.reserve(0); }) {
      T copy;
      copy.reserve(field.size());
      for (auto& element : field) copy.push_back(clone_field(element, map));
      return copy;
    } else {
      return [&]<size_t... i>(std::index_sequence<i...>) {
        return T{clone_field(field[i], map)...};
      }
      (std::make_index_sequence<std::tuple_size_v<T>>());
    }
  } else {
    return field;
  }
}

/// Moves the field back into `original` and puts a clone of it into the copy.
template <class F>
void refill(F& original, F& copied, CloneMap& map) {
  F clone = clone_field(copied, map);
  original = std::move(copied);
  copied = std::move(clone);
}

template <class T, class... Fields>
inline constexpr bool can_clone = std::is_move_constructible_v<T> &&
                                  (std::is_move_assignable_v<Fields> && ...);

template <class T>
T clone_module(T& module, CloneMap& map) {
  check_all_fields_named(module, "clone");
  check_not_sliced("clone", module, typeid(T));
  T copy(std::move(module));
  refilled(module);  // by what follows, also where it throws
  module.with_fields([&]<class... F>(F&... original) {
    copy.with_fields([&](F&... copied) {
      size_t done = 0;
      try {
        ((refill(original, copied, map), ++done), ...);
      } catch (...) {
        size_t i = 0;
        ((i++ < done ? void() : void(original = std::move(copied))), ...);
        throw;
      }
    });
  });
  return copy;
}

}  // namespace detail
}  // namespace lockstep::nn

// What the call operator of a module does around forward: it dispatches to the object's own forward
// whatever the static type, notifies observers, checks that every submodule and leaf that is used
// is a registered field, and adds the module's path to errors.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <vector>

#include <lockstep/nn/fields.h>

namespace lockstep::nn {

namespace detail {
class CallScope;
}

/// Notified of the module calls on its thread while it lives (the latest observer, if several
/// live): what summary() uses. One that is destroyed during a call hears nothing of its end.
class LOCKSTEP_API CallObserver {
 public:
  CallObserver();
  virtual ~CallObserver();
  CallObserver(const CallObserver&) = delete;
  virtual void enter(Module& module) = 0;
  /// `result` is null when forward did not return a Tensor, or threw; what leave() itself throws in
  /// the second case is lost.
  virtual void leave(Module& module, const Tensor* result) = 0;

 private:
  friend class detail::CallScope;
  CallObserver* outer_;
};

/// Lets other modules' forward call a module that is neither their field nor their argument, for
/// good, also after it is moved: the frozen network behind a metric, a critic that has an optimizer
/// of its own. A field of type std::reference_wrapper says the same.
template <class M>
M& external(M& module);

namespace detail {

/// Finds leaves that a call would train although no module registers them: leaves of its results'
/// graph that are neither fields of a module nor arguments.
class LOCKSTEP_API GraphCheck {
 public:
  GraphCheck();
  template <class T>
  void argument(const T& value) {
    see(value, arguments_, true);
  }
  /// Throws Error for such a leaf.
  template <class T>
  void result(Module& called, const T& value) {
    std::vector<const TensorBody*> bodies;
    see(value, bodies, false);
    check(called, bodies);
  }

 private:
  template <class T>
  void see(const T& value, std::vector<const TensorBody*>& bodies, bool argument);
  void check(Module& called, const std::vector<const TensorBody*>& results);

  uint64_t first_node_;  // sequence number of the first node that the call can make
  // Compared by address and not dereferenced: a reference would prevent in-place work in forward.
  std::vector<const TensorBody*> arguments_;
  std::vector<const Node*> argument_nodes_;  // what lies behind them was made before the call
  bool hidden_arguments_ = false;  // some argument's type may hold tensors that see() cannot reach
};

template <class T>
void GraphCheck::see(const T& value, std::vector<const TensorBody*>& bodies, bool argument) {
  if constexpr (std::is_base_of_v<Tensor, T>) {
    if (!value.defined()) return;
    bodies.push_back(value.ref().get());
    if (argument) argument_nodes_.push_back(value.node().get());
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                       std::is_base_of_v<Module, T> ||
                       std::is_convertible_v<const T&, std::string_view>) {
  } else if constexpr (requires { value.has_value(), *value; }) {
    if (value.has_value()) see(*value, bodies, argument);
  } else if constexpr (requires { value.begin(), value.end(); }) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(*value.begin())>, T>)
      hidden_arguments_ |= argument;
    else
      for (const auto& element : value) see(element, bodies, argument);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... elements) { (see(elements, bodies, argument), ...); }, value);
  } else {
    hidden_arguments_ |= argument;
  }
}

/// Lets other modules' forward call this one, as long as it is not moved.
LOCKSTEP_API void permit_calls(Module& module);
/// Throws Error for a module that was moved from and has not been assigned to since. What is left of
/// it would be called, trained and saved as one without layers.
LOCKSTEP_API void check_not_moved_from(const Module& module);
/// The fields of a module that was moved from have been given back to it, or new ones.
LOCKSTEP_API void refilled(Module& module);
/// Whether this thread's calls have an observer.
LOCKSTEP_API bool is_observed();

/// One frame of this thread's stack of module calls.
class LOCKSTEP_API CallScope {
 public:
  /// Throws Error for a module with parameters that is called inside another one's forward and is
  /// neither a field of a module nor permitted.
  explicit CallScope(Module& module);
  ~CallScope();
  CallScope(const CallScope&) = delete;

  /// Whether this thread's innermost call is one of this module.
  static bool innermost_is(const Module& module);
  /// Null but for an outermost call that is the module's first to record a graph.
  GraphCheck* graph_check() const { return graph_check_.get(); }
  /// Notifies the observer; the destructor does where forward threw.
  void leave(const Tensor* result);

 private:
  void check_belongs() const;

  Module& module_;
  CallScope* outer_;
  CallScope& outermost_;
  CallObserver* observer_;
  std::unique_ptr<GraphCheck> graph_check_;
  int exceptions_ = std::uncaught_exceptions();
};

/// Throws Error unless the object's class has a LOCKSTEP_MODULE of its own.
LOCKSTEP_API void check_class(const Module& module);
/// Throws Error when the object's class is not T but extends it.
LOCKSTEP_API void check_not_sliced(const char* op, const Module& module, const std::type_info& t);
[[noreturn]] LOCKSTEP_API void fail_not_unary(const Module& module);

/// Permits calls of modules that are arguments.
template <class T>
void permit_argument(const T& value) {
  if constexpr (std::is_base_of_v<Module, T>)
    permit_calls(const_cast<T&>(value));
  else if constexpr (holder<T> == Holder::reference)
    permit_argument(value.get());
  else if constexpr (holder<T> == Holder::pointer || (std::is_pointer_v<T> && leads_to_part<T>()))
    if (value) permit_argument(*value);
}

template <class M, class... Args>
auto call(M& module, Args&&... args) -> decltype(module.forward(std::forward<Args>(args)...)) {
  using Result = decltype(module.forward(std::forward<Args>(args)...));
  if (typeid(module) != typeid(M)) [[unlikely]] {  // called through a reference to a base class
    check_class(module);
    // A subclass's forward may get at the base's forward by the base's call operator.
    if (CallScope::innermost_is(module)) return module.forward(std::forward<Args>(args)...);
    if constexpr (sizeof...(Args) == 1 && std::is_same_v<Result, Tensor> &&
                  (std::is_convertible_v<Args&&, Tensor> && ...))
      return module.forward_any(std::forward<Args>(args)...);
    else
      check_not_sliced("call", module, typeid(M));
  }
  (permit_argument(args), ...);
  try {
    CallScope scope(module);
    GraphCheck* check = scope.graph_check();
    if (check) (check->argument(args), ...);
    if constexpr (std::is_void_v<Result>) {
      module.forward(std::forward<Args>(args)...);
      scope.leave(nullptr);
    } else {
      Result y = module.forward(std::forward<Args>(args)...);
      if (check) check->result(module, y);
      if constexpr (std::is_same_v<Result, Tensor>)
        scope.leave(&y);
      else
        scope.leave(nullptr);
      return static_cast<Result&&>(y);
    }
  } catch (Error& error) {
    module.add_place(error);
    throw;
  }
}

template <class M>
Tensor call_unary(M& module, Tensor x) {
  if constexpr (requires { Tensor(module.forward(std::move(x))); })
    return call(module, std::move(x));
  else
    fail_not_unary(module);
}

}  // namespace detail
}  // namespace lockstep::nn

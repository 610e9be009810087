// Widened: a CPU kernel for f32 and f64 made one for f16 and bf16 too. It computes on copies in f32, so that
// sums are those of f32, and rounds results once.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include <lockstep/tensor/ops/copy.h>

namespace lockstep::cpu {

inline bool is_half(const Tensor& t) {
  return t.defined() && lockstep::is_half(t.dtype());
}
template <class A>
bool is_half(const A&) {
  return false;
}

/// t itself, or an f32 tensor in the same memory order where t is f16 or bf16.
inline Tensor in_f32(const Tensor& t, bool with_elements) {
  if (!is_half(t)) return t;
  const Tensor wide =
      empty_strided(t.shape(), detail::is_dense(t) ? t.strides() : contiguous_strides(t.shape()),
                    {.dtype = DType::f32});
  if (with_elements) kernels::copy(wide, t);
  return wide;
}

/// f, whose first `results` arguments are written (and read before, if `in_place`), others read alone.
template <auto f, size_t results, bool in_place = false>
struct Widened;
template <class... Args, void (*f)(Args...), size_t results, bool in_place>
struct Widened<f, results, in_place> {
  static void run(Args... args) {
    if ((is_half(args) || ...))
      run_wide(std::index_sequence_for<Args...>(), args...);
    else
      f(args...);
  }

 private:
  template <bool with_elements, class A>
  static A widened(const A& a) {
    if constexpr (std::is_same_v<A, Tensor>)
      return in_f32(a, with_elements);
    else
      return a;
  }
  template <size_t i, class A>
  static void round(const A& a, const A& wide) {
    if constexpr (i < results && std::is_same_v<A, Tensor>)
      if (is_half(a)) kernels::copy(a, wide);
  }
  template <size_t... I>
  static void run_wide(std::index_sequence<I...>, const std::remove_cvref_t<Args>&... args) {
    const std::tuple<std::remove_cvref_t<Args>...> wide(
        widened<in_place || (I >= results)>(args)...);
    f(std::get<I>(wide)...);
    (round<I>(args, std::get<I>(wide)), ...);
  }
};

}  // namespace lockstep::cpu

// collate: samples become one batch, field by field. A Tensor field of shape S becomes one
// contiguous tensor [B, ...S], a whole number an i64 tensor [B], a bool, float or double a tensor
// [B] of its own dtype. A tuple, pair, array or plain struct of up to four fields becomes a tuple
// of these. Another type needs a function collate(const std::vector<MySample>&) beside
// it.
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::data {

/// Stacks CPU tensors of one shape and dtype; ShapeError or DTypeError names the sample that
/// differs.
LOCKSTEP_API Tensor stack_samples(const std::vector<Tensor>& samples);

namespace detail {

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

struct AnyField {
  template <class T>
  operator T() const;
};

// The fields of a plain struct, as a tuple.
template <class T>
requires std::is_aggregate_v<T>
auto fields_of(const T& s) {
  using A = AnyField;
  static_assert(
      !requires {
        T{A(), A(), A(), A(), A()};
      },
      "collate: a sample struct has at most 4 fields; use a tuple, or give it its own collate");
  if constexpr (requires { T{A(), A(), A(), A()}; }) {
    const auto& [a, b, c, d] = s;
    return std::tuple(a, b, c, d);
  } else if constexpr (requires { T{A(), A(), A()}; }) {
    const auto& [a, b, c] = s;
    return std::tuple(a, b, c);
  } else if constexpr (requires { T{A(), A()}; }) {
    const auto& [a, b] = s;
    return std::tuple(a, b);
  } else {
    const auto& [a] = s;
    return std::tuple(a);
  }
}

template <class N>
Tensor stack_numbers(const std::vector<N>& samples) {
  using E = std::conditional_t<std::is_floating_point_v<N> || std::is_same_v<N, bool>, N, int64_t>;
  Tensor t = empty({static_cast<int64_t>(samples.size())}, {.dtype = dtype_of<E>()});
  E* out = t.data<E>();
  for (size_t i = 0; i < samples.size(); ++i) {
    if constexpr (std::is_integral_v<N>)
      LOCKSTEP_CHECK(std::is_signed_v<N> || static_cast<uint64_t>(samples[i]) >> 63 == 0,
                     ValueError, "collate: sample ", i, " is ", samples[i],
                     ", and the largest i64 is 2^63 - 1");
    out[i] = static_cast<E>(samples[i]);
  }
  return t;
}

}  // namespace detail

template <class Sample>
auto collate(const std::vector<Sample>& samples) {
  if constexpr (std::is_same_v<Sample, Tensor>) {
    return stack_samples(samples);
  } else if constexpr (std::is_arithmetic_v<Sample>) {
    return detail::stack_numbers(samples);
  } else if constexpr (detail::TupleLike<Sample>) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      const auto field = [&]<size_t i>(std::integral_constant<size_t, i>) {
        std::vector<std::remove_cvref_t<std::tuple_element_t<i, Sample>>> values;
        values.reserve(samples.size());
        for (const Sample& s : samples) values.push_back(std::get<i>(s));
        return collate(values);
      };
      return std::tuple(field(std::integral_constant<size_t, I>())...);
    }
    (std::make_index_sequence<std::tuple_size_v<Sample>>());
  } else {
    static_assert(
        std::is_aggregate_v<Sample>,
        "collate: a sample is a Tensor, a number, a tuple or a plain struct of these; another type "
        "needs its own collate(const std::vector<MySample>&)");
    std::vector<decltype(detail::fields_of(samples[0]))> tuples;
    tuples.reserve(samples.size());
    for (const Sample& s : samples) tuples.push_back(detail::fields_of(s));
    return collate(tuples);
  }
}

}  // namespace lockstep::data

// Element-wise loops. NaN in gives NaN out; integers wrap around.
#include <lockstep/distributed/gloo/arithmetic.h>

#include <cstring>

#include <lockstep/tensor/half.h>

namespace lockstep::dist::gloo_backend {

namespace {

// What an element is computed as: itself, or float for f16.
template <class T>
auto wide(T x) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>)
    return static_cast<float>(x);
  else
    return x;
}

template <class T, class F>
Combine loop(F f) {
  return [f](void* out, const void* a, const void* b, size_t n) {
    auto* to = static_cast<T*>(out);
    const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<T>(f(wide(x[i]), wide(y[i])));
  };
}

template <class T>
Combine function_of(ReduceOp op) {
  using W = decltype(wide(T()));
  constexpr bool integral = std::is_integral_v<W>;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return loop<T>([](W a, W b) {
        if constexpr (integral)
          return static_cast<W>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
        else
          return a + b;
      });
    case ReduceOp::product:
      return loop<T>([](W a, W b) {
        if constexpr (integral)
          return static_cast<W>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
        else
          return a * b;
      });
    case ReduceOp::min:
      return loop<T>([](W a, W b) { return a < b || a != a ? a : b; });
    case ReduceOp::max:
      return loop<T>([](W a, W b) { return a > b || a != a ? a : b; });
    default:
      break;
  }
  if constexpr (integral) {
    if (op == ReduceOp::band) return loop<T>([](W a, W b) { return static_cast<W>(a & b); });
    if (op == ReduceOp::bor) return loop<T>([](W a, W b) { return static_cast<W>(a | b); });
    if (op == ReduceOp::bxor) return loop<T>([](W a, W b) { return static_cast<W>(a ^ b); });
  }
  fail<DTypeError>(name_of(op), " is not defined for this dtype");
}

}  // namespace

Combine combine_function(DType dtype, ReduceOp op) {
  return dispatch_any(dtype, [op]<class T>(TypeTag<T>) {
    if constexpr (std::is_same_v<T, bool>)
      return function_of<uint8_t>(op);  // as 0 and 1
    else
      return function_of<T>(op);
  });
}

void widen(DType dtype, const std::byte* from, float* to, size_t n) {
  const auto as = [&]<class T>(T) {
    const auto* x = reinterpret_cast<const T*>(from);
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(x[i]);
  };
  dtype == DType::f16 ? as(Half()) : as(BFloat16());
}

void narrow(DType dtype, const float* from, std::byte* to, size_t n) {
  const auto as = [&]<class T>(T) {
    auto* x = reinterpret_cast<T*>(to);
    for (size_t i = 0; i < n; ++i) x[i] = T(from[i]);
  };
  dtype == DType::f16 ? as(Half()) : as(BFloat16());
}

}  // namespace lockstep::dist::gloo_backend

// The loops behind the reductions; plain C++ that the compiler vectorises, bound by memory.
#include <lockstep/distributed/shm/reduce.h>

#include <algorithm>
#include <cstring>

#include <lockstep/tensor/half.h>

namespace lockstep::dist {

std::string_view name_of(ReduceOp op) {
  constexpr std::string_view names[] = {"sum", "avg",  "product", "min",
                                        "max", "band", "bor",     "bxor"};
  return names[static_cast<int>(op)];
}

void check_reducible(std::string_view collective, ReduceOp op, DType dtype) {
  const auto refuse = [&](std::string_view hint) {
    fail<DTypeError>(collective, ": ", name_of(op), " is not defined for ", dtype, "; ", hint);
  };
  const bool bitwise = op >= ReduceOp::band;
  if (is_floating(dtype)) {
    if (bitwise) refuse("bitwise reductions take integers and bool");
  } else if (op == ReduceOp::avg) {
    refuse("convert to a floating dtype, or sum and divide");
  } else if (dtype == DType::boolean && (op == ReduceOp::sum || op == ReduceOp::product)) {
    refuse("max is true where any rank is, min where all are");
  }
}

namespace {

// Integer sums and products wrap around like PyTorch's, without undefined behaviour.
template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else
    return a + b;
}
template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  else
    return a * b;
}

using Buffers = std::span<std::byte* const>;

// T is what is stored, A in what is computed; `f` combines two values, `last` finishes the result
// (avg's division).
template <class T, class A, class Combine, class Last>
void run(Buffers from, Buffers to, size_t count, Combine f, Last last) {
  if constexpr (std::is_same_v<T, A>)
    if (from.size() == 2 && to.size() == 2) {
      T* __restrict a = reinterpret_cast<T*>(from[0]);
      T* __restrict b = reinterpret_cast<T*>(from[1]);
      for (size_t i = 0; i < count; ++i) {
        const T x = last(f(a[i], b[i]));
        a[i] = x;
        b[i] = x;
      }
      return;
    }
  constexpr size_t kTile = 4096 / sizeof(A);  // stays in the first-level cache
  A tile[kTile];
  T result[kTile];
  for (size_t at = 0; at < count; at += kTile) {
    const size_t n = std::min(kTile, count - at);
    const auto piece = [&](std::byte* buffer) { return reinterpret_cast<T*>(buffer) + at; };
    const T* __restrict head = piece(from[0]);
    for (size_t i = 0; i < n; ++i) tile[i] = static_cast<A>(head[i]);
    for (std::byte* buffer : from.subspan(1)) {
      const T* __restrict next = piece(buffer);
      for (size_t i = 0; i < n; ++i) tile[i] = f(tile[i], static_cast<A>(next[i]));
    }
    for (size_t i = 0; i < n; ++i) result[i] = static_cast<T>(last(tile[i]));
    for (std::byte* buffer : to) std::memcpy(piece(buffer), result, n * sizeof(T));
  }
}

template <class T, class A = T>
void reduce_as(Buffers from, Buffers to, size_t count, ReduceOp op) {
  const auto go = [&](auto f) { run<T, A>(from, to, count, f, [](A x) { return x; }); };
  // Lambdas, not function pointers: the loop must have them inline to become vector code.
  const auto plus = [](A a, A b) { return add<A>(a, b); };
  switch (op) {
    case ReduceOp::sum:
      return go(plus);
    case ReduceOp::product:
      return go([](A a, A b) { return multiply<A>(a, b); });
    // x != x: a NaN on either side stays.
    case ReduceOp::min:
      return go([](A a, A b) { return a < b || a != a ? a : b; });
    case ReduceOp::max:
      return go([](A a, A b) { return a > b || a != a ? a : b; });
    case ReduceOp::avg:
      if constexpr (std::is_floating_point_v<A>) {
        const A scale = static_cast<A>(1.0 / static_cast<double>(from.size()));
        return run<T, A>(from, to, count, plus, [=](A x) { return x * scale; });
      }
      return;
    default:
      break;
  }
  if constexpr (std::is_integral_v<A>) {
    if (op == ReduceOp::band) go([](A a, A b) { return static_cast<A>(a & b); });
    if (op == ReduceOp::bor) go([](A a, A b) { return static_cast<A>(a | b); });
    if (op == ReduceOp::bxor) go([](A a, A b) { return static_cast<A>(a ^ b); });
  }
}

}  // namespace

void reduce_into(Buffers from, Buffers to, size_t count, DType dtype, ReduceOp op) {
  dispatch_any(dtype, [&]<class T>(TypeTag<T>) {
    if constexpr (lockstep::detail::is_two_byte_float<T>)
      reduce_as<T, float>(from, to, count, op);
    else if constexpr (std::is_same_v<T, bool>)
      reduce_as<uint8_t>(from, to, count, op);  // as 0 and 1
    else
      reduce_as<T>(from, to, count, op);
  });
}

}  // namespace lockstep::dist

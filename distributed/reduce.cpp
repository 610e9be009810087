// The loops behind all_reduce; plain C++ that the compiler vectorises, bound by memory.
#include <lockstep/distributed/reduce.h>

#include <algorithm>
#include <cstring>

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

// `f` combines two values, `last` finishes the result (avg's division).
template <class T, class Combine, class Last>
void run(std::span<std::byte* const> buffers, size_t count, Combine f, Last last) {
  if (buffers.size() == 2) {
    T* __restrict a = reinterpret_cast<T*>(buffers[0]);
    T* __restrict b = reinterpret_cast<T*>(buffers[1]);
    for (size_t i = 0; i < count; ++i) {
      const T x = last(f(a[i], b[i]));
      a[i] = x;
      b[i] = x;
    }
    return;
  }
  constexpr size_t kTile = 4096 / sizeof(T);  // stays in the first-level cache
  T tile[kTile];
  for (size_t at = 0; at < count; at += kTile) {
    const size_t n = std::min(kTile, count - at);
    std::memcpy(tile, buffers[0] + at * sizeof(T), n * sizeof(T));
    for (size_t r = 1; r < buffers.size(); ++r) {
      const T* __restrict from = reinterpret_cast<const T*>(buffers[r]) + at;
      for (size_t i = 0; i < n; ++i) tile[i] = f(tile[i], from[i]);
    }
    for (size_t i = 0; i < n; ++i) tile[i] = last(tile[i]);
    for (std::byte* to : buffers) std::memcpy(to + at * sizeof(T), tile, n * sizeof(T));
  }
}

template <class T, class Combine>
void run(std::span<std::byte* const> buffers, size_t count, Combine f) {
  run<T>(buffers, count, f, [](T x) { return x; });
}

template <class T>
void reduce_as(std::span<std::byte* const> buffers, size_t count, ReduceOp op) {
  // Lambdas, not function pointers: the loop must have them inline to become vector code.
  const auto plus = [](T a, T b) { return add<T>(a, b); };
  const auto times = [](T a, T b) { return multiply<T>(a, b); };
  // x != x: a NaN on either side stays.
  const auto smaller = [](T a, T b) { return a < b || a != a ? a : b; };
  const auto larger = [](T a, T b) { return a > b || a != a ? a : b; };
  switch (op) {
    case ReduceOp::sum:
      return run<T>(buffers, count, plus);
    case ReduceOp::product:
      return run<T>(buffers, count, times);
    case ReduceOp::min:
      return run<T>(buffers, count, smaller);
    case ReduceOp::max:
      return run<T>(buffers, count, larger);
    case ReduceOp::avg:
      if constexpr (std::is_floating_point_v<T>) {
        const T scale = static_cast<T>(1.0 / static_cast<double>(buffers.size()));
        return run<T>(buffers, count, plus, [=](T x) { return x * scale; });
      }
      break;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::band)
      run<T>(buffers, count, [](T a, T b) { return static_cast<T>(a & b); });
    if (op == ReduceOp::bor) run<T>(buffers, count, [](T a, T b) { return static_cast<T>(a | b); });
    if (op == ReduceOp::bxor)
      run<T>(buffers, count, [](T a, T b) { return static_cast<T>(a ^ b); });
  }
}

/// Two-byte floats: widened to f32, reduced there, and rounded once.
template <class T>
void reduce_wide(std::span<std::byte* const> buffers, size_t count, ReduceOp op) {
  std::vector<float> wide(buffers.size());
  std::vector<std::byte*> at;
  for (float& x : wide) at.push_back(reinterpret_cast<std::byte*>(&x));
  for (size_t i = 0; i < count; ++i) {
    for (size_t r = 0; r < buffers.size(); ++r)
      wide[r] = static_cast<float>(reinterpret_cast<const T*>(buffers[r])[i]);
    reduce_as<float>(at, 1, op);
    for (std::byte* to : buffers) reinterpret_cast<T*>(to)[i] = T(wide[0]);
  }
}

}  // namespace

void reduce_everywhere(std::span<std::byte* const> buffers, size_t count, DType dtype,
                       ReduceOp op) {
  switch (dtype) {
    case DType::f32:
      return reduce_as<float>(buffers, count, op);
    case DType::f64:
      return reduce_as<double>(buffers, count, op);
    case DType::f16:
      return reduce_wide<Half>(buffers, count, op);
    case DType::bf16:
      return reduce_wide<BFloat16>(buffers, count, op);
    case DType::i64:
      return reduce_as<int64_t>(buffers, count, op);
    case DType::i32:
      return reduce_as<int32_t>(buffers, count, op);
    default:
      return reduce_as<uint8_t>(buffers, count, op);  // u8, and bool as 0 and 1
  }
}

}  // namespace lockstep::dist

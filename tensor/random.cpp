#include <lockstep/tensor/random.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

/// Calls f(element, its 32 random bits) for n elements, four to a Philox block, in fixed blocks of
/// work.
template <class F>
void for_each_random(int64_t n, RandomKey key, F f) {
  parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 4) {
      const auto bits = key.block(static_cast<uint64_t>(i / 4));
      for (int64_t j = i; j < std::min(i + 4, end); ++j) f(j, bits[static_cast<size_t>(j - i)]);
    }
  });
}

}  // namespace

RandomKey Generator::next() {
  // A stream (a rank) is a seed of its own: mixed in by an odd multiplier, so that streams never
  // coincide.
  return {seed ^ (stream * 0x9E3779B97F4A7C15u), offset++};
}

Generator& default_generator() {
  thread_local Generator generator;
  return generator;
}
void manual_seed(uint64_t seed) {
  default_generator().seed = seed;
  default_generator().offset = 0;
}

Tensor rand(const Shape& shape, TensorOptions options) {
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  const RandomKey key = default_generator().next();
  dispatch_floating("rand", options.dtype, [&]<class T>(TypeTag<T>) {
    T* p = t.data<T>();
    for_each_random(t.numel(), key, [p](int64_t i, uint32_t bits) {
      p[i] = static_cast<T>(RandomKey::uniform(bits));
    });
  });
  return options.requires_grad ? t.requires_grad_() : t;
}

Tensor randn(const Shape& shape, TensorOptions options) {
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  const RandomKey key = default_generator().next();
  dispatch_floating("randn", options.dtype, [&]<class T>(TypeTag<T>) {
    T* p = t.data<T>();
    const int64_t n = t.numel();
    parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 2) {
        // Elements 2k and 2k+1 are the cosine and the sine of one Box-Muller pair.
        const auto bits = key.block(static_cast<uint64_t>(i / 4));
        const size_t pair = static_cast<size_t>(i % 4);
        const double radius = std::sqrt(-2 * std::log((bits[pair] + 1.0) * 0x1p-32));
        const double angle = 2 * std::numbers::pi * bits[pair + 1] * 0x1p-32;
        p[i] = static_cast<T>(radius * std::cos(angle));
        if (i + 1 < end) p[i + 1] = static_cast<T>(radius * std::sin(angle));
      }
    });
  });
  return options.requires_grad ? t.requires_grad_() : t;
}

Tensor randint(int64_t low, int64_t high, const Shape& shape, TensorOptions options) {
  LOCKSTEP_CHECK(low < high, ValueError, "randint: low ", low, " must be below high ", high);
  LOCKSTEP_CHECK(high - low <= int64_t{1} << 32, ValueError, "randint: the range ", low, " .. ",
                 high, " is wider than 2^32");
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  const RandomKey key = default_generator().next();
  const auto range = static_cast<uint64_t>(high - low);
  dispatch("randint", options.dtype, [&]<class T>(TypeTag<T>) {
    T* p = t.data<T>();
    for_each_random(t.numel(), key, [=](int64_t i, uint32_t bits) {
      p[i] = static_cast<T>(low + static_cast<int64_t>((bits * range) >> 32));
    });
  });
  return t;
}

std::vector<int64_t> random_permutation(int64_t n, RandomKey key) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = n - 1; i > 0; --i) {
    const auto bits = key.block(static_cast<uint64_t>(i));
    const uint64_t wide = (uint64_t{bits[0]} << 32) | bits[1];
    const auto j = static_cast<int64_t>(static_cast<uint64_t>(
        (static_cast<unsigned __int128>(wide) * static_cast<uint64_t>(i + 1)) >> 64));
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(j)]);
  }
  return order;
}

}  // namespace lockstep

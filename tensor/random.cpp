#include <lockstep/tensor/random.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numbers>
#include <numeric>
#include <optional>
#include <thread>

#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

constexpr int64_t kBlock = 1 << 16;  // elements of a task; whole Philox blocks

/// Bits of a uniform number in [0, 1) that T holds exactly.
template <class T>
constexpr int kDigits = std::is_same_v<T, double>     ? 53
                        : std::is_same_v<T, float>    ? 24
                        : std::is_same_v<T, Half>     ? 11
                        : std::is_same_v<T, BFloat16> ? 8
                                                      : std::numeric_limits<T>::digits;

template <class F>
void dispatch_any_floating(const char* op, DType t, F f) {
  LOCKSTEP_CHECK(is_floating(t), DTypeError, op, ": needs a floating dtype, got ", t);
  dispatch_any(t, [&]<class T>(TypeTag<T> tag) {
    if constexpr (!std::is_integral_v<T>) f(tag);
  });
}

/// Calls f(element, its 32 random bits) for n elements, four to a Philox block.
template <class F>
void for_each_random(int64_t n, RandomKey key, F f) {
  parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 4) {
      const auto bits = key.block(static_cast<uint64_t>(i / 4));
      for (int64_t j = i; j < std::min(i + 4, end); ++j) f(j, bits[static_cast<size_t>(j - i)]);
    }
  });
}

/// The place of `bits`, uniform in 0 .. 2^width - 1, in [0, range), or nothing for the few values that
/// would make some places likelier than others.
std::optional<uint64_t> place_in(uint64_t range, uint64_t bits, int width) {
  const auto scaled = static_cast<unsigned __int128>(bits) * range;
  const auto low = static_cast<uint64_t>(scaled) << (64 - width) >> (64 - width);
  if (low < range) {
    const uint64_t excess = (width == 64 ? -range : (uint64_t{1} << width) - range) % range;
    if (low < excess) return std::nullopt;
  }
  return static_cast<uint64_t>(scaled >> width);
}

/// A number in [0, range) for element i, whose first `bits` of this width may be rejected: 64 others,
/// from blocks that no first draw reads, until some are not.
uint64_t bounded(uint64_t range, uint64_t bits, int width, RandomKey key, int64_t i) {
  auto place = place_in(range, bits, width);
  for (uint64_t attempt = 1; !place; ++attempt) {
    const auto words = key.block((attempt << 56) + static_cast<uint64_t>(i));
    place = place_in(range, uint64_t{words[0]} << 32 | words[1], 64);
  }
  return *place;
}

const std::thread::id main_thread = std::this_thread::get_id();

/// What threads other than the main one start from.
struct ThreadSeeds {
  std::mutex mutex;
  uint64_t seed = 0, threads = 0;

  void restart(uint64_t main_seed) {
    const std::lock_guard lock(mutex);
    seed = main_seed;
    threads = 0;
  }
  Generator next() {
    const std::lock_guard lock(mutex);
    const RandomKey key{seed, ++threads};
    return {.seed = key.bits64(~uint64_t{0})};  // a number that no draw of the main thread reads
  }
};
ThreadSeeds& thread_seeds() {
  static ThreadSeeds seeds;
  return seeds;
}

thread_local const Generator* given_generator = nullptr;  // while start_generator runs

/// What this thread starts with.
Generator first_generator() {
  if (given_generator) return *given_generator;
  return std::this_thread::get_id() == main_thread ? Generator{} : thread_seeds().next();
}

}  // namespace

RandomKey Generator::next() {
  // Multiplied by an odd number, no two streams give the same seed.
  return {seed ^ (stream * 0x9E3779B97F4A7C15u), offset++};
}

Generator& default_generator() {
  thread_local Generator generator = first_generator();
  return generator;
}
void detail::start_generator(const Generator& generator) {
  given_generator = &generator;
  default_generator() = generator;
  given_generator = nullptr;
}
void manual_seed(uint64_t seed) {
  default_generator().seed = seed;
  default_generator().offset = 0;
  if (std::this_thread::get_id() == main_thread) thread_seeds().restart(seed);
}

Tensor rand(const Shape& shape, TensorOptions options) {
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  const RandomKey key = default_generator().next();
  dispatch_any_floating("rand", options.dtype, [&]<class T>(TypeTag<T>) {
    T* p = t.data<T>();
    if constexpr (std::is_same_v<T, double>) {
      parallel_for(t.numel(), kBlock, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          p[i] = RandomKey::uniform64(key.bits64(static_cast<uint64_t>(i)));
      });
    } else {
      constexpr int rest = 32 - kDigits<T>;
      for_each_random(t.numel(), key, [p](int64_t i, uint32_t bits) {
        p[i] = static_cast<T>(RandomKey::uniform(bits >> rest << rest));
      });
    }
  });
  return options.requires_grad ? t.requires_grad_() : t;
}

Tensor randn(const Shape& shape, TensorOptions options) {
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  const RandomKey key = default_generator().next();
  dispatch_any_floating("randn", options.dtype, [&]<class T>(TypeTag<T>) {
    T* p = t.data<T>();
    parallel_for(t.numel(), kBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 2) {
        // Elements 2k and 2k+1 are the cosine and the sine of one Box-Muller pair.
        double u, v;  // in (0, 1] and [0, 1)
        if constexpr (std::is_same_v<T, double>) {
          const auto k = static_cast<uint64_t>(i);
          u = RandomKey::uniform64(key.bits64(k)) + 0x1p-53;
          v = RandomKey::uniform64(key.bits64(k + 1));
        } else {
          const auto bits = key.block(static_cast<uint64_t>(i / 4));
          const size_t pair = static_cast<size_t>(i % 4);
          u = (bits[pair] + 1.0) * 0x1p-32;
          v = bits[pair + 1] * 0x1p-32;
        }
        const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * std::numbers::pi * v;
        p[i] = static_cast<T>(radius * std::cos(angle));
        if (i + 1 < end) p[i + 1] = static_cast<T>(radius * std::sin(angle));
      }
    });
  });
  return options.requires_grad ? t.requires_grad_() : t;
}

Tensor randint(int64_t low, int64_t high, const Shape& shape, TensorOptions options) {
  LOCKSTEP_CHECK(low < high, ValueError, "randint: low ", low, " must be below high ", high);
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  const RandomKey key = default_generator().next();
  // From -2^63 to 2^63 - 1: less than 2^64 numbers.
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  dispatch_any(options.dtype, [&]<class T>(TypeTag<T>) {
    if constexpr (!std::is_same_v<T, int64_t>) {
      constexpr int64_t most = (int64_t{1} << kDigits<T>) - (std::is_integral_v<T> ? 1 : 0);
      constexpr int64_t least = std::is_unsigned_v<T> ? 0 : std::is_integral_v<T> ? -most - 1 : -most;
      LOCKSTEP_CHECK(low >= least && high - 1 <= most, ValueError, "randint: ", options.dtype,
                     " holds the whole numbers from ", least, " to ", most, " exactly, not all of [",
                     low, ", ", high, "); draw them in i64");
    }
    T* p = t.data<T>();
    const auto number = [=](uint64_t place) {
      return static_cast<T>(static_cast<int64_t>(static_cast<uint64_t>(low) + place));
    };
    if (range <= uint64_t{1} << 32)
      for_each_random(t.numel(), key, [=](int64_t i, uint32_t bits) {
        const uint64_t scaled = bits * range;  // as in place_in, which decides where it is close
        p[i] = number(static_cast<uint32_t>(scaled) < range ? bounded(range, bits, 32, key, i)
                                                            : scaled >> 32);
      });
    else
      parallel_for(t.numel(), kBlock, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          p[i] = number(bounded(range, key.bits64(static_cast<uint64_t>(i)), 64, key, i));
      });
  });
  return options.requires_grad ? t.requires_grad_() : t;
}

std::vector<int64_t> random_permutation(int64_t n, RandomKey key) {
  LOCKSTEP_CHECK(n >= 0, ValueError, "random_permutation: the length ", n, " is negative");
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

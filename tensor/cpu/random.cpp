// Random numbers on the CPU: every element a function of the key and its place alone.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <type_traits>

#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

namespace lockstep::cpu {
namespace {

using Key = Ref<Cell<RandomKey>>;

constexpr int64_t kBlock = 1 << 16;  // elements of a task; whole Philox blocks

void draw_key_cpu(const Key& key, const Ref<Cell<GeneratorState>>& generator) {
  key->value = generator->value.next();
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

void rand_cpu(const Tensor& t, const Key& given) {
  const RandomKey key = given->value;
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    T* p = t.data<T>();
    if constexpr (std::is_same_v<T, double>) {
      parallel_for(t.numel(), kBlock, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          p[i] = RandomKey::uniform64(key.bits64(static_cast<uint64_t>(i)));
      });
    } else if constexpr (!std::is_integral_v<T>) {
      constexpr int rest = 32 - fraction_bits<T>;
      for_each_random(t.numel(), key, [p](int64_t i, uint32_t bits) {
        p[i] = static_cast<T>(RandomKey::uniform(bits >> rest << rest));
      });
    }
  });
}

void randn_cpu(const Tensor& t, const Key& given) {
  const RandomKey key = given->value;
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
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
}

/// The distribution function of the standard normal distribution, accurate in the lower tail.
double normal_cdf(double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); }

/// Its inverse for p in (0, 1): for p <= 0.5 Abramowitz and Stegun 26.2.22 (error below 3e-3), and two
/// steps of Halley's method, whose error is of the third power of the one before.
double normal_quantile(double p) {
  if (p > 0.5) return -normal_quantile(1 - p);
  const double t = std::sqrt(-2 * std::log(p));
  double x = (2.30753 + 0.27061 * t) / (1 + 0.99229 * t + 0.04481 * t * t) - t;
  for (int step = 0; step < 2; ++step) {
    const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
    const double newton = (normal_cdf(x) - p) / density;
    x -= newton / (1 + 0.5 * x * newton);
  }
  return x;
}

/// Inversion: a uniform draw between the values of the distribution function at the bounds, mapped back. The
/// upper tail is drawn as the lower one, where that function has more digits.
void trunc_normal_cpu(const Tensor& t, double mean, double std, double low, double high,
                      const Key& key) {
  rand_cpu(t, key);
  const bool mirrored = low > mean;
  const double a = (mirrored ? mean - high : low - mean) / std,
               b = (mirrored ? mean - low : high - mean) / std;
  const double from = normal_cdf(a), to = normal_cdf(b);
  double* p = t.data<double>();
  parallel_for(t.numel(), 1 << 12, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double quantile = from + (to - from) * (p[i] + 0x1p-54);  // neither bound itself
      // Beyond 38 deviations the function is 0 in f64, and all of the mass is at the inner bound.
      const double x = quantile > 0 ? std::clamp(normal_quantile(quantile), a, b) : b;
      p[i] = std::clamp(mean + std * (mirrored ? -x : x), low, high);
    }
  });
}

void randint_cpu(const Tensor& t, int64_t low, uint64_t range, const Key& given) {
  const RandomKey key = given->value;
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
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
}

const bool entered =
    kernels::draw_key.set(DeviceType::cpu, draw_key_cpu, dtypes::kAll) &&
    kernels::rand.set(DeviceType::cpu, rand_cpu, dtypes::kFloating) &&
    kernels::randn.set(DeviceType::cpu, randn_cpu, dtypes::kFloating) &&
    kernels::trunc_normal.set(DeviceType::cpu, trunc_normal_cpu, dtypes::only(DType::f64)) &&
    kernels::randint.set(DeviceType::cpu, randint_cpu, dtypes::kAll);

}  // namespace
}  // namespace lockstep::cpu

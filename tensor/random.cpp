#include <lockstep/tensor/random.h>

#include <limits>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

namespace lockstep {
namespace {

/// The whole numbers that a dtype holds exactly, as far as i64 reaches.
std::pair<int64_t, int64_t> whole_numbers(DType t) {
  return dispatch_any(t, []<class T>(TypeTag<T>) -> std::pair<int64_t, int64_t> {
    if constexpr (std::is_integral_v<T>)
      return {static_cast<int64_t>(std::numeric_limits<T>::min()),
              static_cast<int64_t>(std::numeric_limits<T>::max())};
    else
      return {-(int64_t{1} << fraction_bits<T>), int64_t{1} << fraction_bits<T>};
  });
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
    return GeneratorState{.seed = key.bits64(~uint64_t{0})};  // a number that no draw of the main thread reads
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

RandomKey GeneratorState::next() {
  // Multiplied by an odd number, no two streams give the same seed.
  return {seed ^ (stream * 0x9E3779B97F4A7C15u), offset++};
}
Ref<Cell<RandomKey>> Generator::draw() {
  auto key = make_ref<Cell<RandomKey>>();
  kernels::draw_key(key, cell_);
  return key;
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
  default_generator().state().seed = seed;
  default_generator().state().offset = 0;
  if (std::this_thread::get_id() == main_thread) thread_seeds().restart(seed);
}

namespace {

/// A new tensor filled by a draw from the default generator.
Tensor drawn(const char* op, const Kernel<void(const Tensor&, const Ref<Cell<RandomKey>>&)>& kernel,
             const Shape& shape, TensorOptions options) {
  LOCKSTEP_CHECK(is_floating(options.dtype), DTypeError, op, ": needs a floating dtype, got ",
                 options.dtype);
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  kernel(t, default_generator().draw());
  return options.requires_grad ? t.requires_grad_() : t;
}

}  // namespace

Tensor rand(const Shape& shape, TensorOptions options) {
  return drawn("rand", kernels::rand, shape, options);
}
Tensor randn(const Shape& shape, TensorOptions options) {
  return drawn("randn", kernels::randn, shape, options);
}

Tensor randint(int64_t low, int64_t high, const Shape& shape, TensorOptions options) {
  LOCKSTEP_CHECK(low < high, ValueError, "randint: low ", low, " must be below high ", high);
  const auto [least, most] = whole_numbers(options.dtype);
  LOCKSTEP_CHECK(low >= least && high - 1 <= most, ValueError, "randint: ", options.dtype,
                 " holds the whole numbers from ", least, " to ", most, " exactly, not all of [", low,
                 ", ", high, "); draw them in i64");
  Tensor t = empty(shape, {.dtype = options.dtype, .device = options.device});
  // From -2^63 to 2^63 - 1: less than 2^64 numbers.
  kernels::randint(t, low, static_cast<uint64_t>(high) - static_cast<uint64_t>(low),
                   default_generator().draw());
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

namespace kernels {
constinit Kernel<void(const Ref<Cell<RandomKey>>&, const Ref<Cell<GeneratorState>>&)> draw_key(
    "generator", "_draw");
constinit Kernel<void(const Tensor&, const Ref<Cell<RandomKey>>&)> rand("rand"), randn("randn");
constinit Kernel<void(const Tensor&, double, double, double, double, const Ref<Cell<RandomKey>>&)>
    trunc_normal("trunc_normal_");
constinit Kernel<void(const Tensor&, int64_t, uint64_t, const Ref<Cell<RandomKey>>&)> randint(
    "randint");
}  // namespace kernels

}  // namespace lockstep

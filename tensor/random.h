// Generator: Philox 4x32-10, a counter-based source of random numbers. Element i of a draw is a
// function of (seed, offset, i) alone, so the numbers are the same for any thread count and device,
// and the whole state is a few integers. Source: Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

#include <lockstep/tensor/kernel.h>

namespace lockstep {

/// One Philox 4x32-10 block: four 32-bit numbers from a counter and a key.
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

/// The key of one draw: which stream of numbers its elements read.
struct RandomKey {
  uint64_t seed = 0, offset = 0;
  /// The block of four numbers that holds elements 4*block .. 4*block + 3.
  std::array<uint32_t, 4> block(uint64_t block) const {
    return philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                   static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  }
  /// 64 bits of element i: half of block i / 2.
  uint64_t bits64(uint64_t i) const {
    const auto words = block(i / 2);
    return uint64_t{words[i % 2 * 2]} << 32 | words[i % 2 * 2 + 1];
  }
  /// Uniform in [0, 1): the top 24 bits, exact in f32.
  static float uniform(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }
  /// Uniform in [0, 1): the top 53 bits, exact in f64.
  static double uniform64(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }
};

struct LOCKSTEP_API GeneratorState {
  uint64_t seed = 0;
  uint64_t offset = 0;  // one per draw; together with the seed the whole state
  /// Mixed into the seed. DDP sets the rank here, so that ranks draw different masks.
  uint64_t stream = 0;

  bool operator==(const GeneratorState&) const = default;
  /// The key of the next draw.
  RandomKey next();
};

/// A generator is a value: a copy is a snapshot, and assignment sets the state. The state is in memory
/// that kernels read, so that a recorded draw that is made again gives the numbers that follow.
class LOCKSTEP_API Generator {
 public:
  Generator(GeneratorState state = {})  // NOLINT: implicit
      : cell_(make_ref<Cell<GeneratorState>>(state)) {}
  Generator(const Generator& other) : Generator(other.state()) {}
  Generator& operator=(const Generator& other) { return *this = other.state(); }
  Generator& operator=(const GeneratorState& state) {
    cell_->value = state;
    return *this;
  }

  GeneratorState& state() { return cell_->value; }
  const GeneratorState& state() const { return cell_->value; }
  RandomKey next() { return state().next(); }
  /// The key of the next draw as a kernel takes it.
  Ref<Cell<RandomKey>> draw();

 private:
  Ref<Cell<GeneratorState>> cell_;
};

/// This thread's generator, used where an op is given none.
///
/// The main thread (the one that loaded the library) starts with seed 0. Every other thread starts,
/// when it first asks for its generator, with a seed made of the main thread's seed at that moment
/// and of the number of threads that asked since that seed was set: no two threads draw the same
/// numbers, and a program whose threads first ask in a fixed order (each started after the one before
/// has drawn, say) repeats its run. Where the order is left to chance, seed each thread itself:
/// manual_seed in it, or default_generator() = {.seed = seed, .stream = number}. The ranks of
/// dist::run_local start with a copy of their caller's generator.
LOCKSTEP_API Generator& default_generator();
/// Restarts this thread's generator; initialisation depends on nothing else. On the main thread it
/// also sets what threads that ask for their generator later start from; threads that have one keep
/// it.
LOCKSTEP_API void manual_seed(uint64_t seed);

namespace detail {
/// Gives a thread that the library has started its generator. It does not count among the threads
/// that ask for one: the numbers of the program's own threads must not depend on it.
LOCKSTEP_API void start_generator(const Generator& generator);
}  // namespace detail

/// Uniform in [0, 1), 1 excluded, with as many random bits as the dtype's fraction holds: 53 for f64,
/// 24 for f32, 11 for f16, 8 for bf16. Other dtypes are a DTypeError.
LOCKSTEP_API Tensor rand(const Shape& shape, TensorOptions options = {});
/// Normal, mean 0, variance 1 (Box and Muller, 1958). Floating dtypes only. The uniform numbers
/// behind it have 53 bits for f64, 32 for the others, so values reach to 8.5 and to 6.6.
LOCKSTEP_API Tensor randn(const Shape& shape, TensorOptions options = {});
/// Whole numbers in [low, high), each equally likely (Lemire, "Fast random integer generation in an
/// interval", 2019); i64 unless `options` says otherwise. ValueError unless low < high, and where the
/// dtype cannot hold all of the numbers exactly.
LOCKSTEP_API Tensor randint(int64_t low, int64_t high, const Shape& shape,
                            TensorOptions options = {.dtype = DType::i64});

/// A random order of 0 .. n-1 that depends on the key alone (Fisher-Yates). ValueError for n < 0.
LOCKSTEP_API std::vector<int64_t> random_permutation(int64_t n, RandomKey key);

namespace kernels {
/// key = the next of the generator, which goes on.
LOCKSTEP_API extern Kernel<void(const Ref<Cell<RandomKey>>& key,
                                const Ref<Cell<GeneratorState>>& generator)>
    draw_key;
/// Every element of the floating t (row-major): uniform in [0, 1), and normal, as rand and randn say.
LOCKSTEP_API extern Kernel<void(const Tensor& t, const Ref<Cell<RandomKey>>& key)> rand;
LOCKSTEP_API extern Kernel<void(const Tensor& t, const Ref<Cell<RandomKey>>& key)> randn;
/// Every element of t (row-major, f64): normal with this mean and standard deviation, given that it lies
/// between low and high.
LOCKSTEP_API extern Kernel<void(const Tensor& t, double mean, double std, double low, double high,
                                const Ref<Cell<RandomKey>>& key)>
    trunc_normal;
/// Every element of t (row-major, any dtype): low plus a whole number in [0, range).
LOCKSTEP_API extern Kernel<void(const Tensor& t, int64_t low, uint64_t range,
                                const Ref<Cell<RandomKey>>& key)>
    randint;
}  // namespace kernels

}  // namespace lockstep

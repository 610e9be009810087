// Generator: Philox 4x32-10, a counter-based source of random numbers. Element i of a draw is a
// function of (seed, offset, i) alone, so the numbers are the same for any thread count and device,
// and the whole state is a few integers. Source: Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

#include <lockstep/tensor/tensor.h>

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
  /// Uniform in [0, 1): the top 24 bits, exact in f32.
  static float uniform(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }
};

struct LOCKSTEP_API Generator {
  uint64_t seed = 0;
  uint64_t offset = 0;  // one per draw; together with the seed the whole state
  uint64_t stream =
      0;  // mixed into the seed: DDP sets the rank here, so that ranks draw different masks

  RandomKey next();
};

/// This thread's generator, used where an op is given none.
LOCKSTEP_API Generator& default_generator();
/// Restarts this thread's generator; initialisation depends on nothing else.
LOCKSTEP_API void manual_seed(uint64_t seed);

/// Uniform in [0, 1).
LOCKSTEP_API Tensor rand(const Shape& shape, TensorOptions options = {});
/// Normal, mean 0, variance 1 (Box-Muller).
LOCKSTEP_API Tensor randn(const Shape& shape, TensorOptions options = {});
/// Whole numbers in [low, high); i64 unless `options` says otherwise.
LOCKSTEP_API Tensor randint(int64_t low, int64_t high, const Shape& shape,
                            TensorOptions options = {.dtype = DType::i64});

/// A random order of 0 .. n-1 that depends on the key alone (Fisher-Yates).
LOCKSTEP_API std::vector<int64_t> random_permutation(int64_t n, RandomKey key);

}  // namespace lockstep

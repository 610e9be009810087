// Keyed randomness for data: what happens to a sample depends on (seed, epoch, sample, purpose) and
// on nothing else, so any number of workers or ranks, and a resumed run, see the same data.
#pragma once

#include <cstdint>

#include <lockstep/tensor/random.h>

namespace lockstep::data {

/// Keeps the draws of one sample apart. A user's own purposes start at Purpose::user.
enum class Purpose : uint32_t {
  shuffle = 0,
  sample = 1,
  shift = 2,
  generator = 3,  // what default_generator() gives in get and in transforms
  user = 1u << 16
};

/// Where the randomness of one epoch comes from; datasets and transforms are given one.
struct RandomSource {
  uint64_t seed = 0;
  int64_t epoch = 0;

  /// The key of one sample and purpose: a Philox block of the four, so distinct ones never
  /// coincide.
  RandomKey key(int64_t sample, Purpose purpose = Purpose::sample) const {
    const auto [a, b, c, d] = philox(
        {static_cast<uint32_t>(sample), static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32),
         static_cast<uint32_t>(epoch), static_cast<uint32_t>(purpose)},
        {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    return {.seed = a | uint64_t{b} << 32, .offset = c | uint64_t{d} << 32};
  }
};

/// Single numbers of one key, one after the other.
class Draws {
 public:
  explicit Draws(RandomKey key) : key_(key) {}
  uint32_t bits() {
    if (used_ % 4 == 0) block_ = key_.block(used_ / 4);
    return block_[used_++ % 4];
  }
  /// In [0, 1).
  float uniform() { return RandomKey::uniform(bits()); }
  /// In [0, n), 1 <= n <= 2^32; each with the same chance to within n / 2^32.
  int64_t below(int64_t n) {
    return static_cast<int64_t>((uint64_t{bits()} * static_cast<uint64_t>(n)) >> 32);
  }

 private:
  RandomKey key_;
  uint64_t used_ = 0;
  std::array<uint32_t, 4> block_{};
};

}  // namespace lockstep::data

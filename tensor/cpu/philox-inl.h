// Philox 4x32-10 on SIMD lanes: one block of four numbers per 64-bit lane, the same numbers as
// RandomKey in tensor/random.h gives element by element.
#if defined(LOCKSTEP_TENSOR_CPU_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_TENSOR_CPU_PHILOX_INL_H_
#undef LOCKSTEP_TENSOR_CPU_PHILOX_INL_H_
#else
#define LOCKSTEP_TENSOR_CPU_PHILOX_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include <lockstep/tensor/random.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int64_t kUniforms = 256;

template <class T>
class UniformBuffer {
 public:
  /// kUniforms numbers in [0, 1), those of the elements first, first + 1, ...; valid until the next
  /// call.
  const T* fill(uint64_t seed, uint64_t offset, uint64_t first) {
    fill_floats(seed, offset, first / 4, static_cast<size_t>((first % 4 + kUniforms + 3) / 4));
    const float* u = floats_ + first % 4;
    if constexpr (sizeof(T) == sizeof(float)) {
      return u;
    } else {
      for (int64_t i = 0; i < kUniforms; ++i) wide_[i] = u[i];
      return wide_;
    }
  }

 private:
#if HWY_TARGET == HWY_SCALAR
  void fill_floats(uint64_t seed, uint64_t offset, uint64_t block, size_t blocks) {
    const RandomKey key{seed, offset};
    for (size_t b = 0; b < blocks; ++b) {
      const auto words = key.block(block + b);
      for (size_t i = 0; i < 4; ++i) floats_[4 * b + i] = RandomKey::uniform(words[i]);
    }
  }
#else
  using D64 = hn::ScalableTag<uint64_t>;
  using V = hn::Vec<D64>;

  void fill_floats(uint64_t seed, uint64_t offset, uint64_t block, size_t blocks) {
    const D64 d;
    const hn::Repartition<float, D64> df;
    const hn::Repartition<int32_t, D64> di;
    const auto scale = hn::Set(df, 0x1p-24f);
    for (size_t b = 0; b < blocks; b += hn::Lanes(d)) {
      const auto counter = hn::Add(hn::Set(d, block + b), hn::Iota(d, uint64_t{0}));
      V w[4] = {counter, hn::ShiftRight<32>(counter), hn::Set(d, offset), hn::Set(d, offset >> 32)};
      rounds(w, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      for (int pair = 0; pair < 2; ++pair) {  // two numbers side by side in a lane, made uniform
        const V bits = hn::Or(hn::And(w[2 * pair], hn::Set(d, 0xffffffff)),
                              hn::ShiftLeft<32>(w[2 * pair + 1]));
        const auto top = hn::ShiftRight<8>(hn::BitCast(hn::Repartition<uint32_t, D64>(), bits));
        w[pair] = hn::BitCast(d, hn::Mul(hn::ConvertTo(df, hn::BitCast(di, top)), scale));
      }
      hn::StoreInterleaved2(w[0], w[1], d, reinterpret_cast<uint64_t*>(floats_ + 4 * b));
    }
  }

  static HWY_INLINE V product(V a, uint32_t b) {  // of the low halves
    const hn::Repartition<uint32_t, D64> d32;
    return hn::MulEven(hn::BitCast(d32, a), hn::Set(d32, b));
  }
  /// Only the low halves of the words count; the high halves hold whatever the steps leave there.
  static HWY_INLINE void rounds(V* w, uint32_t k0, uint32_t k1) {
    const D64 d;
    for (int round = 0; round < 10; ++round) {
      const V p0 = product(w[0], 0xD2511F53), p1 = product(w[2], 0xCD9E8D57);
      w[0] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), w[1]), hn::Set(d, uint64_t{k0}));
      w[1] = p1;
      w[2] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), w[3]), hn::Set(d, uint64_t{k1}));
      w[3] = p0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
  }
#endif

  static constexpr int kRoom = kUniforms + 4 + 4 * HWY_MAX_BYTES / 8;
  HWY_ALIGN float floats_[kRoom];
  HWY_ALIGN T wide_[sizeof(T) == sizeof(float) ? 1 : kUniforms];
};

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

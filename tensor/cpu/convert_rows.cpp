// The conversions of half.h in SIMD: the same integer arithmetic on 32-bit lanes, with selects for
// branches. Not every processor has an instruction for them; memory bandwidth is the bound either
// way.
#include <lockstep/tensor/cpu/simd_targets.h>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE <lockstep/tensor/cpu/convert_rows.cpp>
#include <hwy/foreach_target.h>

#include <hwy/highway.h>

#include <lockstep/tensor/cpu/convert_rows.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using D32 = hn::ScalableTag<int32_t>;
using DFloat = hn::ScalableTag<float>;
using D16 = hn::Rebind<uint16_t, D32>;
using V32 = hn::Vec<D32>;
using V16 = hn::Vec<D16>;

HWY_INLINE V32 number(int32_t v) { return hn::Set(D32(), v); }

/// Half::round: bits of floats to bits of halves.
HWY_INLINE V32 round_to(Half, V32 x) {
  const V32 magnitude = hn::And(x, number(0x7FFFFFFF));
  const V32 sign = hn::And(hn::ShiftRight<16>(x), number(0x8000));
  // 0x477FF000, halfway between 65504 and 65536, comes out as infinity, and so does all above it.
  const V32 finite = hn::Min(magnitude, number(0x477FF000));
  const V32 odd = hn::And(hn::ShiftRight<13>(finite), number(1));
  const V32 normal = hn::ShiftRight<13>(hn::Add(finite, hn::Sub(odd, number(0x37FFF001))));
  const auto sum = hn::Add(hn::BitCast(DFloat(), magnitude), hn::Set(DFloat(), 0.5f));
  const V32 small = hn::Sub(hn::BitCast(D32(), sum), number(0x3F000000));
  const V32 nan = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), number(0x1FF)), number(0x7E00));
  V32 y = hn::IfThenElse(hn::Lt(magnitude, number(0x38800000)), small, normal);
  y = hn::IfThenElse(hn::Gt(magnitude, number(0x7F800000)), nan, y);
  return hn::Or(y, sign);
}
HWY_INLINE V32 widen(Half, V32 h) {
  const V32 rest = hn::And(h, number(0x7FFF));
  const V32 sign = hn::ShiftLeft<16>(hn::And(h, number(0x8000)));
  const V32 shifted = hn::ShiftLeft<13>(rest);
  const V32 normal = hn::Add(shifted, number(0x38000000));
  const V32 special = hn::Add(shifted, number(0x70000000));
  const V32 small =
      hn::BitCast(D32(), hn::Mul(hn::ConvertTo(DFloat(), rest), hn::Set(DFloat(), 0x1p-24f)));
  V32 y = hn::IfThenElse(hn::Lt(rest, number(0x0400)), small, normal);
  y = hn::IfThenElse(hn::Gt(rest, number(0x7BFF)), special, y);
  return hn::Or(y, sign);
}

/// BFloat16::round.
HWY_INLINE V32 round_to(BFloat16, V32 x) {
  const hn::ScalableTag<uint32_t> unsigned_lanes;  // where a sum may wrap around
  const auto bits = hn::BitCast(unsigned_lanes, x);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(unsigned_lanes, 1u));
  const auto nearest =
      hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(unsigned_lanes, 0x7FFFu))));
  return hn::IfThenElse(hn::Gt(hn::And(x, number(0x7FFFFFFF)), number(0x7F800000)),
                        hn::Or(hn::BitCast(D32(), upper), number(0x40)),
                        hn::BitCast(D32(), nearest));
}
HWY_INLINE V32 widen(BFloat16, V32 h) { return hn::ShiftLeft<16>(h); }

HWY_INLINE void convert_pack(const float* from, Half* to) {
  const V32 y = round_to(Half(), hn::BitCast(D32(), hn::LoadU(DFloat(), from)));
  hn::StoreU(hn::DemoteTo(D16(), y), D16(), reinterpret_cast<uint16_t*>(to));
}
HWY_INLINE void convert_pack(const float* from, BFloat16* to) {
  const V32 y = round_to(BFloat16(), hn::BitCast(D32(), hn::LoadU(DFloat(), from)));
  hn::StoreU(hn::DemoteTo(D16(), y), D16(), reinterpret_cast<uint16_t*>(to));
}
template <class From>
HWY_INLINE void convert_pack(const From* from, float* to) {
  const V16 h = hn::LoadU(D16(), reinterpret_cast<const uint16_t*>(from));
  hn::StoreU(hn::BitCast(DFloat(), widen(From(), hn::PromoteTo(D32(), h))), DFloat(), to);
}

template <class To, class From>
void convert(const From* from, To* to, int64_t n) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(D32()));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) convert_pack(from + i, to + i);
  for (; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

}  // namespace

const cpu::ConvertRows* convert_rows_table() {
  static constexpr cpu::ConvertRows rows{convert<Half, float>, convert<float, Half>,
                                         convert<BFloat16, float>, convert<float, BFloat16>};
  return &rows;
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(convert_rows_table);
const cpu::ConvertRows& cpu::convert_rows() {
  static const ConvertRows* rows =
      (respect_isa_limit(), HWY_DYNAMIC_DISPATCH(convert_rows_table)());
  return *rows;
}
}  // namespace lockstep
#endif

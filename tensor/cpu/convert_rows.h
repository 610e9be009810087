// Rows of floats to rows of two-byte floats and back, for every instruction set: what gradients go
// through on their way to the wire.
#pragma once

#include <cstdint>

#include <lockstep/tensor/half.h>

namespace lockstep::cpu {

/// to[i] = from[i], rounded as half.h rounds (to the same bits); rows of n elements without gaps.
struct ConvertRows {
  void (*round_to_f16)(const float* from, Half* to, int64_t n);
  void (*widen_f16)(const Half* from, float* to, int64_t n);
  void (*round_to_bf16)(const float* from, BFloat16* to, int64_t n);
  void (*widen_bf16)(const BFloat16* from, float* to, int64_t n);

  void operator()(const float* from, Half* to, int64_t n) const { round_to_f16(from, to, n); }
  void operator()(const Half* from, float* to, int64_t n) const { widen_f16(from, to, n); }
  void operator()(const float* from, BFloat16* to, int64_t n) const { round_to_bf16(from, to, n); }
  void operator()(const BFloat16* from, float* to, int64_t n) const { widen_bf16(from, to, n); }
};
const ConvertRows& convert_rows();

}  // namespace lockstep::cpu

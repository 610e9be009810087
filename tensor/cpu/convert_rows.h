// Conversion of rows of f32 to f16 and bf16 and back, for every instruction set: the dtypes in
// which compressed gradients are sent.
#pragma once

#include <cstdint>

#include <lockstep/tensor/half.h>

namespace lockstep::cpu {

/// to[i] = from[i], with the same bits as half.h; rows of n contiguous elements.
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

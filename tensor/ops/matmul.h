// matmul: the matrix product.
#pragma once

#include <lockstep/tensor/kernel.h>

namespace lockstep {

/// a [..., M, K] times b [..., K, N] gives [..., M, N]; leading dimensions broadcast. Floating, both
/// alike; f16 and bf16 are summed in f32 and rounded once. A 1-d operand is a row (left) or column (right) whose dimension is dropped from the
/// result, as in PyTorch. Throws ShapeError when the inner dimensions differ.
LOCKSTEP_API Tensor matmul(const Tensor& a, const Tensor& b);

namespace kernels {
/// y [..., M, N], dense = a b, where the leading dimensions of a and b broadcast to y's.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& a, const Tensor& b)> matmul;
}  // namespace kernels

namespace detail {
/// Whether one of the last two dimensions is dense and the other does not overlap it.
inline bool is_matrix(const Tensor& t) {
  const int64_t rows = t.size(-2), cols = t.size(-1), rs = t.strides()[t.dim() - 2],
                cs = t.strides()[t.dim() - 1];
  auto fits = [](int64_t dense, int64_t other, int64_t dense_stride, int64_t other_stride) {
    return (dense_stride == 1 || dense == 1) && (other == 1 || other_stride >= dense);
  };
  return fits(cols, rows, cs, rs) || fits(rows, cols, rs, cs);
}
}  // namespace detail

}  // namespace lockstep

// matmul: the matrix product.
#pragma once

#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// a [..., M, K] times b [..., K, N] gives [..., M, N]; leading dimensions broadcast. f32 or f64,
/// both alike. A 1-d operand is a row (left) or column (right) whose dimension is dropped from the
/// result, as in PyTorch. Throws ShapeError when the inner dimensions differ.
LOCKSTEP_API Tensor matmul(const Tensor& a, const Tensor& b);

namespace detail {
/// y [..., M, N], dense = a b, raw: no graph, no checks. What backward passes write slots with.
LOCKSTEP_API Kernel<void(const Tensor& a, const Tensor& b, const Tensor& y)>& matmul_kernel();
}  // namespace detail

}  // namespace lockstep

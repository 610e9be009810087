// take_along and put_along: reading one element of each slice, and its transpose. They carry the
// gradients of ops that pick by index (max over a dimension, the label's log-probability in
// cross_entropy).
#pragma once

#include <lockstep/tensor/kernel.h>

namespace lockstep {

/// y[..., 0, ...] = x[..., indices[..., 0, ...], ...]: `indices` (i64) has x's shape with size 1 at
/// `dim`, and so has the result. Other shapes are a ShapeError, an index outside [0, the size of
/// `dim`) is an IndexError.
LOCKSTEP_API Tensor take_along(const Tensor& x, const Tensor& indices, int dim);
/// The transpose: zeros of `shape` with x's elements where take_along would read them; x has the
/// shape of `indices`.
LOCKSTEP_API Tensor put_along(const Tensor& x, const Tensor& indices, int dim, const Shape& shape);

namespace kernels {
/// y = take_along(x, indices, dim); y is row-major.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, const Tensor& indices, int dim)>
    take_along;
/// The elements of y (row-major, zeros) that take_along would read = x.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, const Tensor& indices, int dim)>
    put_along;
}  // namespace kernels

}  // namespace lockstep

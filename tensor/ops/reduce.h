// Reductions over some or all dimensions, and sum_to, the transpose of broadcasting. Those that are formulas
// are in reductions-inl.h. Sums are made of fixed blocks added in order, so they are accurate and do not
// depend on the number of threads. NaN in gives NaN out.
//
//   Tensor per_row = sum(x, {-1});               // [N, C] -> [N]
//   auto [best, where] = max(logits, 1);         // values [N], indices [N]
#pragma once

#include <lockstep/tensor/kernel.h>
#include <lockstep/tensor/ops/reduction_traits.h>

namespace lockstep {

/// Sums a broadcast result down to `shape`, which must broadcast to x's shape (else ShapeError). x
/// itself when nothing is to be summed.
LOCKSTEP_API Tensor sum_to(const Tensor& x, const Shape& shape);

/// The sum of all elements, 0-d. Integers and bool are summed in i64; f32 with double totals.
LOCKSTEP_API Tensor sum(const Tensor& x);
/// The sum over `dims` (none named: all), which stay with size 1 if `keepdim`. A dimension out of
/// range is an IndexError, one named twice a ValueError.
LOCKSTEP_API Tensor sum(const Tensor& x, const Shape& dims, bool keepdim = false);

/// The mean of all elements, 0-d; of none: NaN. Floating dtypes only (else DTypeError).
LOCKSTEP_API Tensor mean(const Tensor& x);
LOCKSTEP_API Tensor mean(const Tensor& x, const Shape& dims, bool keepdim = false);

/// The variance over `dims` (none named: all): the squared deviations divided by n - correction, in
/// two passes. correction 1 is the unbiased estimate, 0 that of a whole population. Floating dtypes
/// only.
LOCKSTEP_API Tensor var(const Tensor& x, const Shape& dims = {}, double correction = 1,
                        bool keepdim = false);

/// The 2-norm over `dims` (none named: all): the root of the sum of squares, which may be of any
/// magnitude. Floating dtypes only (else DTypeError).
LOCKSTEP_API Tensor norm(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
/// The largest and the smallest element over `dims` (none named: all); NaN if there is one. The gradient is
/// shared evenly by those that equal it. No elements are a ShapeError.
LOCKSTEP_API Tensor amax(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
LOCKSTEP_API Tensor amin(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
/// Whether any, or every, element over `dims` (none named: all) differs from 0: bool. NaN does.
LOCKSTEP_API Tensor any(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
LOCKSTEP_API Tensor all(const Tensor& x, const Shape& dims = {}, bool keepdim = false);

/// The largest element, 0-d; NaN if there is one. Its gradient is shared evenly by those that equal
/// it. A tensor without elements is a ShapeError.
LOCKSTEP_API Tensor max(const Tensor& x);

/// Of each slice along a dimension the largest value, and where the first of these stands (i64).
struct MaxResult {
  Tensor values, indices;
};
/// The gradient of `values` goes to the element at `indices`.
LOCKSTEP_API MaxResult max(const Tensor& x, int64_t dim, bool keepdim = false);

/// Where the largest value of each slice along `dim` stands, i64: the first of equals; NaN counts
/// as the largest. An empty dimension is a ShapeError.
LOCKSTEP_API Tensor argmax(const Tensor& x, int64_t dim, bool keepdim = false);

/// The kernel of a reduction: y = the reduction of x over the dimensions where y, of the same number of
/// dimensions, has size 1. y is row-major, of x's dtype, but bool for predicates and i64 for sums of
/// integers and bool.
template <class R>
LOCKSTEP_API Kernel<void(const Tensor& y, const Tensor& x)>& reduction_kernel();

namespace kernels {
/// y = the sum of squared deviations of x from their mean, divided by `divisor`, over the same
/// dimensions.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, double divisor)>
    squared_deviations;
/// indices (row-major i64, size 1 at `dim`) = where the first largest element of each slice stands.
LOCKSTEP_API extern Kernel<void(const Tensor& indices, const Tensor& x, int dim)> argmax;
}  // namespace kernels

}  // namespace lockstep

// softmax and log_softmax over one dimension. The maximum is taken out first, so large values do
// not overflow. A slice with a NaN, or of nothing but -inf, gives NaN.
#pragma once

#include <lockstep/tensor/kernel.h>

namespace lockstep {

/// y = exp(x) / sum(exp(x)) along `dim`: positive, each slice sums to 1. Floating (else
/// DTypeError); a dimension out of range is an IndexError. The result is row-major.
LOCKSTEP_API Tensor softmax(const Tensor& x, int64_t dim);
/// y = x - log(sum(exp(x))) along `dim`: more accurate than log(softmax(x)).
LOCKSTEP_API Tensor log_softmax(const Tensor& x, int64_t dim);

namespace kernels {
// y and dx are row-major; x and dy have any strides.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, int dim)> softmax;
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, int dim)> log_softmax;
/// dx = y (dy - sum(y dy))
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& y, const Tensor& dy, int dim)>
    softmax_backward;
/// dx = dy - exp(y) sum(dy)
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& y, const Tensor& dy, int dim)>
    log_softmax_backward;
}  // namespace kernels

}  // namespace lockstep

// layer_norm: each sample normalised over its last dimensions (Ba, Kiros and Hinton, 2016).
#pragma once

#include <lockstep/tensor/kernel.h>

namespace lockstep {

/// y = (x - mean) / sqrt(variance + eps) * weight + bias, with mean and (biased) variance over the
/// last dimensions of x, whose sizes are `normalized_shape`; weight and bias have that shape, or
/// are undefined. Floating, all of one dtype (DTypeError); shapes that do not fit are a
/// ShapeError. Row-major result.
LOCKSTEP_API Tensor layer_norm(const Tensor& x, const Shape& normalized_shape,
                               const Tensor& weight = {}, const Tensor& bias = {},
                               double eps = 1e-5);

namespace kernels {
/// x and y are [M, n], row-major; weight and bias [n], row-major, or undefined; statistics [M, 3],
/// in compute_dtype(), takes each row's mean, what rounding took from the mean, and sqrt(variance + eps).
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& statistics, const Tensor& x,
                                const Tensor& weight, const Tensor& bias, double eps)>
    layer_norm;
/// The gradients that are defined are computed. All row-major.
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                                const Tensor& dy, const Tensor& x, const Tensor& weight,
                                const Tensor& statistics)>
    layer_norm_backward;
}  // namespace kernels

}  // namespace lockstep

// linear: a layer's product with bias and activation in one go.
#pragma once

#include <lockstep/tensor/kernel.h>
#include <lockstep/tensor/ops/activation.h>

namespace lockstep {

/// activation(x W^T + b). x [..., in], weight [out, in], bias [out] or undefined; gives [..., out].
/// Floating, all of one dtype; f16 and bf16 are summed in f32 and rounded once.
LOCKSTEP_API Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                           Activation activation = Activation::none);

namespace kernels {
/// y [R, out], dense (of any number of dimensions) = x W^T + b, and max(0, .) of it with `relu`. x [R, in]
/// and w [out, in] have a dense dimension, see detail::is_matrix(); b [out], dense, or undefined.
LOCKSTEP_API extern Kernel<void(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b,
                                bool relu)>
    linear;
/// Those of dx [R, in], dw [out, in] and db [out] that are defined, all dense: dx needs w, dw needs x. dy
/// and y are [R, out], dense; y is defined with relu, whose derivative passes where not y <= 0.
LOCKSTEP_API extern Kernel<void(const Tensor& dx, const Tensor& dw, const Tensor& db,
                                const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& y)>
    linear_backward;
}  // namespace kernels

}  // namespace lockstep

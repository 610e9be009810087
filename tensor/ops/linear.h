// linear: a layer's product with bias and activation in one go.
#pragma once

#include <lockstep/tensor/ops/activation.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// activation(x W^T + b). x [..., in], weight [out, in], bias [out] or undefined; gives [..., out].
/// f32 or f64.
LOCKSTEP_API Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                           Activation activation = Activation::none);

}  // namespace lockstep

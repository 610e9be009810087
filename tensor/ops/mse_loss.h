// mse_loss: the squared error, its mean or its sum.
#pragma once

#include <lockstep/tensor/ops/reduction.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// (input - target)^2, then its mean or sum over all elements (0-d), or as it is. Both have one
/// shape (else ShapeError: a silent broadcast of [N] against [N, 1] is a classic mistake) and one
/// floating dtype.
LOCKSTEP_API Tensor mse_loss(const Tensor& input, const Tensor& target,
                             Reduction reduction = Reduction::mean);

}  // namespace lockstep

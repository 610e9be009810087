// Copies of tensors that can be updated as one flat array. Internal to this folder.
#pragma once

#include <lockstep/tensor/ops/copy.h>

namespace lockstep::optim {

using lockstep::detail::is_dense;

/// t itself if its elements lie in the order of `strides` (dense) and have this dtype, else a copy
/// that does.
Tensor in_layout(const Tensor& t, const Strides& strides, DType dtype);

}  // namespace lockstep::optim

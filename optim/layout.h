// Which tensors can be updated as one flat array, whatever the order of their dimensions in memory,
// and copies of the others that can. Internal to this folder.
#pragma once

#include <lockstep/tensor/tensor.h>

namespace lockstep::optim {

/// Whether the elements fill one block of memory without gaps or repeats, in any order of
/// dimensions.
bool is_dense(const Tensor& t);
/// t itself if its elements lie in the order of `strides` (dense) and have this dtype, else a copy
/// that does.
Tensor in_layout(const Tensor& t, const Strides& strides, DType dtype);

}  // namespace lockstep::optim

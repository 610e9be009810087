// cat and stack: several tensors as one.
#pragma once

#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// The tensors one after the other along an existing dimension; the other sizes must agree
/// (ShapeError). Dtypes promote. Channels-last if all are, else row-major. At least one tensor
/// (ValueError).
LOCKSTEP_API Tensor cat(const std::vector<Tensor>& tensors, int64_t dim = 0);
/// Tensors of one shape side by side along a new dimension: n of [a, b] along 1 give [a, n, b].
LOCKSTEP_API Tensor stack(const std::vector<Tensor>& tensors, int64_t dim = 0);

}  // namespace lockstep

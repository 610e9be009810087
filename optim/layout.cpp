#include <lockstep/optim/layout.h>

#include <lockstep/tensor/ops/copy.h>

namespace lockstep::optim {

Tensor in_layout(const Tensor& t, const Strides& strides, DType dtype) {
  bool same = t.dtype() == dtype;
  for (int i = 0; i < t.dim() && same; ++i)
    same = t.shape()[i] == 1 || t.strides()[i] == strides[i];
  if (same) return t;
  const Tensor copy = empty_strided(t.shape(), strides, {.dtype = dtype, .device = t.device()});
  lockstep::kernels::copy(copy, t);
  return copy;
}

}  // namespace lockstep::optim

#include <lockstep/optim/layout.h>

#include <lockstep/tensor/ops/copy.h>

namespace lockstep::optim {

bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  // Sorted by stride, each dimension must begin where the ones inside it end.
  Shape sizes, strides;
  for (int i = 0; i < t.dim(); ++i) {
    if (t.shape()[i] == 1) continue;
    int at = 0;
    while (at < strides.dims() && strides[at] < t.strides()[i]) ++at;
    strides.insert(at, t.strides()[i]);
    sizes.insert(at, t.shape()[i]);
  }
  int64_t expected = 1;
  for (int i = 0; i < sizes.dims(); ++i) {
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

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

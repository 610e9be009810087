#include <lockstep/tensor/ops/copy.h>

#include <functional>

#include <lockstep/tensor/node.h>

namespace lockstep {

bool detail::overlaps(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int d = 0; d < t.dim(); ++d) last += (t.shape()[d] - 1) * t.strides()[d];
    return static_cast<const char*>(t.data_ptr()) +
           (last + 1) * static_cast<int64_t>(size_of(t.dtype()));
  };
  if (std::less_equal<const char*>()(end(a), static_cast<const char*>(b.data_ptr())) ||
      std::less_equal<const char*>()(end(b), static_cast<const char*>(a.data_ptr())))
    return false;
  return a.data_ptr() != b.data_ptr() || a.dtype() != b.dtype() || a.shape() != b.shape() ||
         a.strides() != b.strides();
}

bool detail::is_dense(const Tensor& t) {
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

Tensor detail::on_host(const Tensor& t) {
  if (t.device().is_cpu()) return t;
  const NoGradGuard guard;
  return t.detach().to(Device());
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&)> copy("copy_");
constinit Kernel<void(const Tensor&, const OnHost&)> upload("to", "_device");
constinit Kernel<void(const OnHost&, const Tensor&)> download("to", "_host");
constinit Kernel<void(const Tensor&, Number)> fill("fill_");
constinit Kernel<void(const Tensor&, int64_t, int64_t)> arange("arange");
}  // namespace kernels

}  // namespace lockstep

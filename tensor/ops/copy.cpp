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

#include <lockstep/optim/clip.h>

#include <cmath>

#include <lockstep/optim/layout.h>
#include <lockstep/optim/update.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise.h>

namespace lockstep::optim {
namespace {

std::vector<Tensor> gradients_of(const char* op, const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& p : parameters) {
    const Tensor g = p.grad();
    if (!g.defined()) continue;
    g.storage().check_writable(op);
    gradients.push_back(g.detach());
  }
  return gradients;
}

}  // namespace

Tensor clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, ClipOptions options) {
  LOCKSTEP_CHECK(max_norm >= 0, ValueError, "clip_grad_norm_: max_norm must not be negative, got ",
                 max_norm);
  LOCKSTEP_CHECK(options.norm_type > 0, ValueError,
                 "clip_grad_norm_: norm_type must be positive, got ", options.norm_type);
  const NoGradGuard guard;
  const std::vector<Tensor> gradients = gradients_of("clip_grad_norm_", parameters);
  std::vector<Tensor> dense;
  for (const Tensor& g : gradients) dense.push_back(is_dense(g) ? g : g.contiguous());
  const Device device = gradients.empty() ? Device() : gradients[0].device();
  const Tensor factors = empty({2}, {.dtype = DType::f64, .device = device});
  lockstep::kernels::grad_norm(factors, dense, options.norm_type);
  const Tensor norm = factors[0] * factors[1];
  if (options.error_if_nonfinite) {
    const double value = norm.item<double>();
    LOCKSTEP_CHECK(std::isfinite(value), ValueError,
                   "clip_grad_norm_: the norm of the gradients is ", value,
                   "; look for the first NaN, or pass {.error_if_nonfinite = false} to scale by it");
  }
  lockstep::kernels::clip_grad_norm(dense, factors, max_norm);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!dense[i].is_same(gradients[i])) lockstep::kernels::copy(gradients[i], dense[i]);
    gradients[i].storage().bump_version();
  }
  return norm;
}

void clip_grad_value_(const std::vector<Tensor>& parameters, double value) {
  LOCKSTEP_CHECK(value >= 0, ValueError, "clip_grad_value_: the value must not be negative, got ",
                 value);
  const NoGradGuard guard;
  for (Tensor g : gradients_of("clip_grad_value_", parameters)) clamp_(g, -value, value);
}

}  // namespace lockstep::optim

namespace lockstep::kernels {
constinit Kernel<void(const Tensor&, const std::vector<Tensor>&, double)> grad_norm(
    "clip_grad_norm_", "norm");
constinit Kernel<void(const std::vector<Tensor>&, const Tensor&, double)> clip_grad_norm(
    "clip_grad_norm_", "scale");
}  // namespace lockstep::kernels

#include <lockstep/optim/clip.h>

#include <algorithm>
#include <cmath>

#include <lockstep/optim/kernels.h>
#include <lockstep/optim/layout.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::optim {
namespace {

constexpr int64_t kBlock = 1 << 14;

std::vector<Tensor> gradients_of(const char* op, const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& p : parameters) {
    const Tensor g = p.grad();
    if (!g.defined()) continue;
    LOCKSTEP_CHECK(g.dtype() == DType::f32 || g.dtype() == DType::f64, DTypeError, op,
                   ": gradients are f32 or f64, got ", g.dtype());
    gradients.push_back(g.detach());
  }
  return gradients;
}

/// The sum of f(block) over fixed blocks of a dense tensor, added in order.
template <class F>
double sum_blocks(const Tensor& dense, F f) {
  const int64_t n = dense.numel(), blocks = (n + kBlock - 1) / kBlock;
  std::vector<double> parts(static_cast<size_t>(blocks));
  parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
    parts[static_cast<size_t>(begin / kBlock)] = f(begin, end);
  });
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

template <class T>
double power_of(T x, double norm_type) {
  const double a = std::abs(static_cast<double>(x));
  return norm_type == 1 ? a : norm_type == 0 ? static_cast<double>(a != 0) : std::pow(a, norm_type);
}

double total_norm(const std::vector<Tensor>& gradients, double norm_type) {
  const bool largest = std::isinf(norm_type);
  double total = 0;
  for (const Tensor& g : gradients) {
    const Tensor dense = is_dense(g) ? g : g.contiguous();
    if (largest) {
      if (dense.numel() == 0) continue;
      const double m = max(abs(dense)).item<double>();
      total = std::isnan(m) || std::isnan(total) ? NAN : std::max(total, m);
      continue;
    }
    total += dispatch_floating("clip_grad_norm_", g.dtype(), [&]<class T>(TypeTag<T>) {
      const T* p = dense.data<T>();
      if (norm_type == 2) {
        const auto squares =
            g.dtype() == DType::f32 ? kernels::table().squares_f32 : kernels::table().squares_f64;
        return sum_blocks(
            dense, [&](int64_t begin, int64_t end) { return squares(p + begin, end - begin); });
      }
      return sum_blocks(dense, [&](int64_t begin, int64_t end) {
        double sum = 0;
        for (int64_t i = begin; i < end; ++i) sum += power_of(p[i], norm_type);
        return sum;
      });
    });
  }
  return largest || norm_type == 1 ? total
         : norm_type == 2          ? std::sqrt(total)
                                   : std::pow(total, 1 / norm_type);
}

}  // namespace

double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm,
                       ClipOptions options) {
  LOCKSTEP_CHECK(max_norm >= 0, ValueError, "clip_grad_norm_: max_norm must not be negative, got ",
                 max_norm);
  LOCKSTEP_CHECK(options.norm_type > 0, ValueError,
                 "clip_grad_norm_: norm_type must be positive, got ", options.norm_type);
  const NoGradGuard guard;
  const std::vector<Tensor> gradients = gradients_of("clip_grad_norm_", parameters);
  const double norm = total_norm(gradients, options.norm_type);
  LOCKSTEP_CHECK(std::isfinite(norm) || !options.error_if_nonfinite, ValueError,
                 "clip_grad_norm_: the norm of the gradients is ", norm,
                 "; look for the first NaN, or pass {.error_if_nonfinite = false} to scale by it");
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  for (Tensor g : gradients) {
    if (!is_dense(g)) {
      g.mul_(factor);
      continue;
    }
    const Update::Row scale =
        g.dtype() == DType::f32 ? kernels::table().scale.f32 : kernels::table().scale.f64;
    void* arrays[] = {g.data_ptr()};
    parallel_for(g.numel(), kBlock,
                 [&](int64_t begin, int64_t end) { scale(&factor, arrays, begin, end); });
    g.storage().bump_version();
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

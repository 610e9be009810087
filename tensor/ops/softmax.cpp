#include <lockstep/tensor/ops/softmax.h>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {
namespace {

struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kOutput;
  int dim;
  Tensor forward(const Tensor& x) {
    Tensor y = empty(x.shape(), {.dtype = x.dtype(), .device = x.device()});
    kernels::softmax(y, x, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor y = saved.output();
    if (is_grad_enabled()) {
      const Tensor wide = y.to(compute_dtype(y.dtype())), g = dy.to(wide.dtype());
      return dx.set(0, (wide * (g - sum(wide * g, {dim}, true))).to(y.dtype()));
    }
    Tensor g = empty(y.shape(), {.dtype = y.dtype(), .device = y.device()});
    kernels::softmax_backward(g, y, dy, dim);
    dx.set(0, std::move(g));
  }
};

struct LogSoftmax {
  static constexpr const char* name = "log_softmax";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kOutput;
  int dim;
  Tensor forward(const Tensor& x) {
    Tensor y = empty(x.shape(), {.dtype = x.dtype(), .device = x.device()});
    kernels::log_softmax(y, x, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor y = saved.output();
    if (is_grad_enabled()) {
      const double n = static_cast<double>(y.dim() ? y.size(dim) : 1);
      const Tensor wide = y.to(compute_dtype(y.dtype())), g = dy.to(wide.dtype());
      // A mean stays within range.
      return dx.set(0, (g - exp(wide) * mean(g, {dim}, true) * n).to(y.dtype()));
    }
    Tensor g = empty(y.shape(), {.dtype = y.dtype(), .device = y.device()});
    kernels::log_softmax_backward(g, y, dy, dim);
    dx.set(0, std::move(g));
  }
};

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim) {
  return apply(Softmax{wrap_dim("softmax", dim, x.dim())}, x);
}
Tensor log_softmax(const Tensor& x, int64_t dim) {
  return apply(LogSoftmax{wrap_dim("log_softmax", dim, x.dim())}, x);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, int)> softmax("softmax");
constinit Kernel<void(const Tensor&, const Tensor&, int)> log_softmax("log_softmax");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> softmax_backward(
    "softmax_backward");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> log_softmax_backward(
    "log_softmax_backward");
}  // namespace kernels

}  // namespace lockstep

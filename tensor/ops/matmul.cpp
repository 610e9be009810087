#include <lockstep/tensor/ops/matmul.h>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {
namespace {

/// dA = dY B^T, dB = A^T dY, each summed over the dimensions that were broadcast.
struct Matmul {
  static constexpr const char* name = "matmul";
  static constexpr Precision precision = Precision::lower;
  static constexpr unsigned saves_for(int i) { return i == 0 ? kInput(1) : kInput(0); }
  Shape a_shape = {}, b_shape = {};

  Tensor forward(const Tensor& a, const Tensor& b) {
    a_shape = a.shape();
    b_shape = b.shape();
    LOCKSTEP_CHECK(a.dim() >= 2 && b.dim() >= 2, ShapeError,
                   "matmul: operands need at least one dimension, got ", a.shape(), " and ",
                   b.shape());
    LOCKSTEP_CHECK(a.size(-1) == b.size(-2), ShapeError,
                   "matmul: inner dimensions differ: ", a.shape(), " x ", b.shape(),
                   a.size(-1) == b.size(-1) ? "; did you mean b.transpose(-2, -1)?" : "");
    LOCKSTEP_CHECK(a.dtype() == b.dtype(), DTypeError, "matmul: dtypes differ: ", a.dtype(),
                   " and ", b.dtype(), "; convert one with to()");
    Shape a_batch, b_batch;
    for (int i = 0; i + 2 < a.dim(); ++i) a_batch.push_back(a.shape()[i]);
    for (int i = 0; i + 2 < b.dim(); ++i) b_batch.push_back(b.shape()[i]);
    Shape shape = broadcast_shapes("matmul", a_batch, b_batch);
    shape.push_back(a.size(-2));
    shape.push_back(b.size(-1));
    Tensor y = empty(shape, {.dtype = a.dtype(), .device = a.device()});
    kernels::matmul(y, a, b);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if (dx.needed(0))
      dx.set(0, product_into(dx.destination(0), dy, saved.input(1).transpose(-2, -1), a_shape));
    if (dx.needed(1))
      dx.set(1, product_into(dx.destination(1), saved.input(0).transpose(-2, -1), dy, b_shape));
  }

  /// p q, summed to `shape`; written straight to `out` where that is given and nothing is summed.
  static Tensor product_into(const Tensor& out, const Tensor& p, const Tensor& q,
                             const Shape& shape) {
    if (out.defined() && shape.dims() == 2 && p.dim() == 2 && q.dim() == 2) {
      kernels::matmul(out, p, q);
      return out;
    }
    return sum_to(matmul(p, q), shape);
  }
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  LOCKSTEP_CHECK(a.dim() > 0 && b.dim() > 0, ShapeError,
                 "matmul: operands need at least one dimension, got ", a.shape(), " and ",
                 b.shape());
  if (a.dim() == 1) return matmul(a.unsqueeze(0), b).squeeze(b.dim() == 1 ? 0 : -2);
  if (b.dim() == 1) return matmul(a, b.unsqueeze(1)).squeeze(-1);
  return apply(Matmul{}, a, b);
}
Tensor Tensor::matmul(const Tensor& other) const { return lockstep::matmul(*this, other); }

constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&)> kernels::matmul("matmul");

}  // namespace lockstep

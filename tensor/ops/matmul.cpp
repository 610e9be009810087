#include <lockstep/tensor/ops/matmul.h>

#include <algorithm>

#include <lockstep/tensor/cpu/gemm.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

// In multiplications: a product worth all threads, and a task of smaller ones.
constexpr double kLargeProduct = 1 << 24, kSmallBlock = 1 << 18;

Tensor as_matrix(const Tensor& t) { return cpu::is_matrix(t) ? t : t.contiguous(); }

/// The offset in elements of the i-th matrix (row-major count over `batch`) of t, whose own leading
/// dimensions broadcast to `batch`.
int64_t matrix_offset(const Tensor& t, const Shape& batch, int64_t i) {
  int64_t offset = 0;
  for (int d = batch.dims() - 1; d >= 0; --d) {
    const int own = d - (batch.dims() - (t.dim() - 2));
    if (own >= 0 && t.shape()[own] != 1) offset += i % batch[d] * t.strides()[own];
    i /= batch[d];
  }
  return offset;
}

void matmul_cpu(const Tensor& a, const Tensor& b, const Tensor& y) {
  const Tensor am = as_matrix(a), bm = as_matrix(b);
  const int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  Shape batch = y.shape();
  batch.erase(batch.dims() - 1);
  batch.erase(batch.dims() - 1);
  dispatch_floating("matmul", y.dtype(), [&]<class T>(TypeTag<T>) {
    // Large products run one after the other, each on all threads; small ones side by side.
    const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    const int64_t count = batch.numel();
    const int64_t together = work >= kLargeProduct ? count : static_cast<int64_t>(
        std::clamp(kSmallBlock / std::max(work, 1.0), 1.0, static_cast<double>(std::max<int64_t>(count, 1))));
    parallel_for(count, together, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        cpu::gemm<T>(m, n, k, cpu::matrix<T>(am, matrix_offset(am, batch, i)),
                     cpu::matrix<T>(bm, matrix_offset(bm, batch, i)), y.data<T>() + i * m * n, n);
    });
  });
}

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
    detail::matmul_kernel().on(a.device())(a, b, y);
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
      detail::matmul_kernel().on(out.device())(p, q, out);
      return out;
    }
    return sum_to(matmul(p, q), shape);
  }
};

}  // namespace

namespace detail {
Kernel<void(const Tensor& a, const Tensor& b, const Tensor& y)>& matmul_kernel() {
  static Kernel<void(const Tensor&, const Tensor&, const Tensor&)> kernel{"matmul", matmul_cpu};
  return kernel;
}
}  // namespace detail

Tensor matmul(const Tensor& a, const Tensor& b) {
  LOCKSTEP_CHECK(a.dim() > 0 && b.dim() > 0, ShapeError,
                 "matmul: operands need at least one dimension, got ", a.shape(), " and ",
                 b.shape());
  if (a.dim() == 1) return matmul(a.unsqueeze(0), b).squeeze(b.dim() == 1 ? 0 : -2);
  if (b.dim() == 1) return matmul(a, b.unsqueeze(1)).squeeze(-1);
  return apply(Matmul{}, a, b);
}
Tensor Tensor::matmul(const Tensor& other) const { return lockstep::matmul(*this, other); }

}  // namespace lockstep

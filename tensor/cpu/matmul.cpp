// matmul on the CPU: batches of products.
#include <algorithm>

#include <lockstep/tensor/cpu/gemm.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

// In multiplications: a product worth all threads, and a task of smaller ones.
constexpr double kLargeProduct = 1 << 24, kSmallBlock = 1 << 18;

Tensor as_matrix(const Tensor& t) { return detail::is_matrix(t) ? t : t.contiguous(); }

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

void matmul_cpu(const Tensor& y, const Tensor& a, const Tensor& b) {
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

const bool entered = kernels::matmul.set(DeviceType::cpu, cpu::Widened<matmul_cpu, 1>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep

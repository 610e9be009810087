#include <lockstep/tensor/cpu/gemm.h>

#include <algorithm>
#include <type_traits>

#include <Eigen/Core>

#include <lockstep/tensor/parallel.h>

#ifdef LOCKSTEP_HAS_ONEDNN
#include <lockstep/tensor/cpu/onednn.h>
#endif

namespace lockstep::cpu {
namespace {

/// One block on the calling thread.
template <class T>
void product(int64_t m, int64_t n, int64_t k, MatrixRef<T> a, MatrixRef<T> b, T* c,
             int64_t c_stride, bool accumulate) {
#ifdef LOCKSTEP_HAS_ONEDNN
  if constexpr (std::is_same_v<T, float>) {
    const SingleThreaded scope;
    const dnnl_status_t status =
        dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', m, n, k, 1.0f, a.data,
                   a.stride, b.data, b.stride, accumulate ? 1.0f : 0.0f, c, c_stride);
    LOCKSTEP_CHECK(status == dnnl_success, Error, "gemm: oneDNN refused a product of [", m, ", ", k,
                   "] x [", k, ", ", n, "] with status ", static_cast<int>(status));
    return;
  }
#endif
  using Row = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Stride = Eigen::OuterStride<>;
  using Map = Eigen::Map<const Row, 0, Stride>;
  Eigen::Map<Row, 0, Stride> out(c, m, n, Stride(c_stride));
  auto add = [&](const auto& x, const auto& y) {
    if (accumulate)
      out.noalias() += x * y;
    else
      out.noalias() = x * y;
  };
  const Map am(a.data, a.transposed ? k : m, a.transposed ? m : k, Stride(a.stride));
  const Map bm(b.data, b.transposed ? n : k, b.transposed ? k : n, Stride(b.stride));
  if (a.transposed && b.transposed)
    add(am.transpose(), bm.transpose());
  else if (a.transposed)
    add(am.transpose(), bm);
  else if (b.transposed)
    add(am, bm.transpose());
  else
    add(am, bm);
}

template <class T>
void finish(T* c, int64_t m, int64_t n, int64_t c_stride, const T* bias, bool relu) {
  for (int64_t i = 0; i < m; ++i) {
    T* row = c + i * c_stride;
    // NaN > 0 is false and NaN < 0 as well: `x < 0 ? 0 : x` keeps NaN, as relu must.
    if (bias && relu)
      for (int64_t j = 0; j < n; ++j) row[j] = row[j] + bias[j] < 0 ? T(0) : row[j] + bias[j];
    else if (bias)
      for (int64_t j = 0; j < n; ++j) row[j] += bias[j];
    else if (relu)
      for (int64_t j = 0; j < n; ++j) row[j] = row[j] < 0 ? T(0) : row[j];
  }
}

/// At most eight blocks of a multiple of `unit`: small enough to share, large enough to run at full
/// speed. Rows can be cut at 64; columns only at 192, since with AVX-512 oneDNN works on 48 at a time
/// and takes up to 2.5 times as long for blocks of 64.
int64_t block_size(int64_t n, int64_t unit) {
  return std::max(unit, (n + 8 * unit - 1) / (8 * unit) * unit);
}
constexpr int64_t kRows = 64, kColumns = 192;

}  // namespace

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, MatrixRef<T> a, MatrixRef<T> b, T* c, int64_t c_stride,
          bool accumulate, Epilogue<T> epilogue) {
  if (m == 0 || n == 0) return;
  auto block = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const MatrixRef<T> ab{a.data + (a.transposed ? i0 : i0 * a.stride), a.stride, a.transposed};
    const MatrixRef<T> bb{b.data + (b.transposed ? j0 * b.stride : j0), b.stride, b.transposed};
    T* cb = c + i0 * c_stride + j0;
    if (k > 0)
      product(i1 - i0, j1 - j0, k, ab, bb, cb, c_stride, accumulate);
    else if (!accumulate)
      for (int64_t i = 0; i < i1 - i0; ++i) std::fill_n(cb + i * c_stride, j1 - j0, T(0));
    finish(cb, i1 - i0, j1 - j0, c_stride, epilogue.bias ? epilogue.bias + j0 : nullptr,
           epilogue.relu);
  };
  if (m >= 128 || m >= n)
    parallel_for(m, block_size(m, kRows), [&](int64_t i0, int64_t i1) { block(i0, i1, 0, n); });
  else
    parallel_for(n, block_size(n, kColumns), [&](int64_t j0, int64_t j1) { block(0, m, j0, j1); });
}

template void gemm(int64_t, int64_t, int64_t, MatrixRef<float>, MatrixRef<float>, float*, int64_t,
                   bool, Epilogue<float>);
template void gemm(int64_t, int64_t, int64_t, MatrixRef<double>, MatrixRef<double>, double*,
                   int64_t, bool, Epilogue<double>);

}  // namespace lockstep::cpu

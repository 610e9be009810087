#include <lockstep/tensor/cpu/gemm.h>

#include <algorithm>
#include <type_traits>

#include <Eigen/Core>

#include <lockstep/tensor/cpu/block_sums.h>
#include <lockstep/tensor/cpu/sum_rows.h>
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
    LOCKSTEP_CHECK(status != dnnl_out_of_memory, OutOfMemory,
                   "gemm: oneDNN has no memory for a product of [", m, ", ", k, "] x [", k, ", ", n,
                   "]");
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

// Longer inner dimensions are cut at these lengths, and the blocks summed in f64: the kernels add up
// to so many terms with an error of a few units in the last place, those for vectors to fewer.
constexpr int64_t kDepth = 8192, kVectorDepth = 1024, kDotDepth = 32768;

template <class T>
MatrixRef<T> part_of(MatrixRef<T> m, int64_t row, int64_t column) {
  return {m.data + (m.transposed ? column * m.stride + row : row * m.stride + column), m.stride,
          m.transposed};
}
/// A single row or column without gaps as a row of a matrix.
template <class T>
MatrixRef<T> vector_as_row(MatrixRef<T> m, int64_t k) {
  return m.transposed && m.stride == 1 ? MatrixRef<T>{m.data, k, false} : m;
}

/// C = A B for a long inner dimension, dense, of a single row or column of C where `vector`.
template <class T>
void long_product(int64_t m, int64_t n, int64_t k, MatrixRef<T> a, MatrixRef<T> b, T* c,
                  bool vector, int64_t most_chunks) {
  MatrixRef<T> bt{b.data, b.stride, !b.transposed};
  if (m == 1) a = vector_as_row(a, k);
  if (n == 1) bt = vector_as_row(bt, k);
  const bool dots = vector && !a.transposed && !bt.transposed;  // both are dense along k
  const int64_t depth = dots ? kDotDepth : vector ? kVectorDepth : kDepth;
  sum_blocks(
      (k + depth - 1) / depth, m * n, c,
      [&](int64_t block, T* partial) {
        const int64_t begin = block * depth, terms = std::min(depth, k - begin);
        if (!dots)
          return product(m, n, terms, part_of(a, 0, begin), part_of(b, begin, 0), partial, n,
                         false);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j)
            partial[i * n + j] = static_cast<T>(sum_rows<T>().products(
                a.data + i * a.stride + begin, bt.data + j * bt.stride + begin, T(0), terms));
      },
      most_chunks);
}

}  // namespace

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, MatrixRef<T> a, MatrixRef<T> b, T* c, int64_t c_stride,
          bool accumulate, Epilogue<T> epilogue) {
  if (m == 0 || n == 0) return;
  const bool by_rows = m >= 128 || m >= n, vector = m == 1 || n == 1;
  const int64_t rows = by_rows ? block_size(m, kRows) : m;
  const int64_t columns = by_rows ? n : block_size(n, kColumns);
  const int64_t tiles = (m + rows - 1) / rows * ((n + columns - 1) / columns);
  auto block = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const MatrixRef<T> ab = part_of(a, i0, 0), bb = part_of(b, 0, j0);
    const int64_t height = i1 - i0, width = j1 - j0;
    T* cb = c + i0 * c_stride + j0;
    if (k > (vector ? 4 * kVectorDepth : kDepth)) {
      const Tensor sum = empty({height, width}, {.dtype = dtype_of<T>()});
      long_product(height, width, k, ab, bb, sum.data<T>(), vector, tiles > 1 ? 1 : 8);
      for (int64_t i = 0; i < height; ++i)
        for (int64_t j = 0; j < width; ++j) {
          const T value = sum.data<T>()[i * width + j];
          cb[i * c_stride + j] = accumulate ? cb[i * c_stride + j] + value : value;
        }
    } else if (k > 0) {
      product(height, width, k, ab, bb, cb, c_stride, accumulate);
    } else if (!accumulate) {
      for (int64_t i = 0; i < height; ++i) std::fill_n(cb + i * c_stride, width, T(0));
    }
    finish(cb, height, width, c_stride, epilogue.bias ? epilogue.bias + j0 : nullptr,
           epilogue.relu);
  };
  if (by_rows)
    parallel_for(m, rows, [&](int64_t i0, int64_t i1) { block(i0, i1, 0, n); });
  else
    parallel_for(n, columns, [&](int64_t j0, int64_t j1) { block(0, m, j0, j1); });
}

template void gemm(int64_t, int64_t, int64_t, MatrixRef<float>, MatrixRef<float>, float*, int64_t,
                   bool, Epilogue<float>);
template void gemm(int64_t, int64_t, int64_t, MatrixRef<double>, MatrixRef<double>, double*,
                   int64_t, bool, Epilogue<double>);

}  // namespace lockstep::cpu

// gemm: the matrix product under every layer. oneDNN's generated code for f32 where it was built
// in, Eigen otherwise and for f64. The product is cut into blocks that depend on the shape alone
// and never on the number of threads; each block runs single-threaded, so its bits are always the
// same. Long inner dimensions are summed in blocks, so that their length costs no accuracy.
#pragma once

#include <cstdint>

#include <lockstep/tensor/tensor.h>

namespace lockstep::cpu {

/// What is done to a finished block of C while it is still in cache.
template <class T>
struct Epilogue {
  const T* bias = nullptr;  // [n], added to every row
  bool relu = false;
};

/// A matrix in memory: `transposed` says that element (i, j) stands at data[j * stride + i].
template <class T>
struct MatrixRef {
  const T* data;
  int64_t stride;
  bool transposed;
};

/// C [m, n], dense rows `c_stride` apart = A [m, k] * B [k, n] (+ C if accumulate), then the
/// epilogue.
template <class T>
void gemm(int64_t m, int64_t n, int64_t k, MatrixRef<T> a, MatrixRef<T> b, T* c, int64_t c_stride,
          bool accumulate = false, Epilogue<T> epilogue = {});

extern template void gemm(int64_t, int64_t, int64_t, MatrixRef<float>, MatrixRef<float>, float*,
                          int64_t, bool, Epilogue<float>);
extern template void gemm(int64_t, int64_t, int64_t, MatrixRef<double>, MatrixRef<double>, double*,
                          int64_t, bool, Epilogue<double>);

/// The last two dimensions of `t`, starting at element `offset`, as a matrix gemm can read without
/// a copy; `t` must satisfy detail::is_matrix().
template <class T>
MatrixRef<T> matrix(const Tensor& t, int64_t offset = 0) {
  const int rows = t.dim() - 2, cols = t.dim() - 1;
  const T* p = t.data<T>() + offset;
  if (t.strides()[cols] == 1 || t.shape()[cols] == 1)
    return {p, std::max(t.strides()[rows], t.shape()[cols]), false};
  return {p, std::max(t.strides()[cols], t.shape()[rows]), true};
}

}  // namespace lockstep::cpu

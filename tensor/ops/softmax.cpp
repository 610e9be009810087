#include <lockstep/tensor/ops/softmax.h>

#include <algorithm>
#include <array>
#include <vector>

#include <lockstep/tensor/cpu/softmax_columns.h>
#include <lockstep/tensor/cpu/softmax_rows.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kOutput;
  int dim;
  Tensor forward(const Tensor& x) {
    Tensor y = empty(x.shape(), {.dtype = x.dtype(), .device = x.device()});
    kernels::softmax.on(x.device())(y, x, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor y = saved.output();
    if (is_grad_enabled()) return dx.set(0, y * (dy - sum(y * dy, {dim}, true)));
    Tensor g = empty(y.shape(), {.dtype = y.dtype(), .device = y.device()});
    kernels::softmax_backward.on(y.device())(g, y, dy, dim);
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
    kernels::log_softmax.on(x.device())(y, x, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor y = saved.output();
    if (is_grad_enabled()) {
      const double n = static_cast<double>(y.dim() ? y.size(dim) : 1);
      return dx.set(0, dy - exp(y) * mean(dy, {dim}, true) * n);  // a mean stays within range
    }
    Tensor g = empty(y.shape(), {.dtype = y.dtype(), .device = y.device()});
    kernels::log_softmax_backward.on(y.device())(g, y, dy, dim);
    dx.set(0, std::move(g));
  }
};

/// Calls row(pointers, n) for every slice along `dim` of tensors of one shape, the first of which
/// is written. Slices with gaps are gathered into a buffer, and the result is scattered.
template <class T, size_t N, class Row>
void for_each_row(const std::array<const Tensor*, N>& tensors, int dim, const Row& row) {
  const Tensor& y = *tensors[0];
  if (y.numel() == 0) return;
  const int64_t n = y.dim() ? y.shape()[dim] : 1;
  const bool all_rows =
      dim == y.dim() - 1 && std::all_of(tensors.begin(), tensors.end(),
                                        [](const Tensor* t) { return t->is_contiguous(); });
  parallel_for(y.numel() / n, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
    std::vector<T> buffer;
    for (int64_t i = begin; i < end; ++i) {
      T* pointers[N];
      if (all_rows) {
        for (size_t t = 0; t < N; ++t) pointers[t] = tensors[t]->template data<T>() + i * n;
        row(pointers, n);
        continue;
      }
      int64_t strides[N];
      for (size_t t = 0; t < N; ++t) {
        const Tensor& x = *tensors[t];
        int64_t offset = 0, rest = i;
        for (int d = x.dim(); d-- > 0;)
          if (d != dim) {
            offset += rest % x.shape()[d] * x.strides()[d];
            rest /= x.shape()[d];
          }
        pointers[t] = x.data<T>() + offset;
        strides[t] = x.dim() && n > 1 ? x.strides()[dim] : 1;
      }
      T* const target = pointers[0];
      for (size_t t = 0; t < N; ++t) {
        if (strides[t] == 1) continue;
        buffer.resize(N * static_cast<size_t>(n));
        T* dense = buffer.data() + static_cast<int64_t>(t) * n;
        for (int64_t k = 0; t > 0 && k < n; ++k) dense[k] = pointers[t][k * strides[t]];
        pointers[t] = dense;
      }
      row(pointers, n);
      for (int64_t k = 0; pointers[0] != target && k < n; ++k)
        target[k * strides[0]] = pointers[0][k];
    }
  });
}

/// Calls columns(pointers, stride, n, count) for blocks of neighbouring slices along `dim`, which is not
/// the last dimension of row-major tensors of one shape.
template <class T, size_t N, class Columns>
void for_each_column(const std::array<const Tensor*, N>& tensors, int dim, const Columns& columns) {
  const Tensor& y = *tensors[0];
  const int64_t n = y.shape()[dim], stride = y.strides()[dim];  // stride: columns side by side
  const int64_t outer = y.numel() / (n * stride);
  const int64_t per_outer = (stride + cpu::kSoftmaxColumns - 1) / cpu::kSoftmaxColumns;
  const int64_t block = std::min(stride, cpu::kSoftmaxColumns) * n;  // elements
  parallel_for(outer * per_outer, std::max<int64_t>(1, 8192 / block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % per_outer * cpu::kSoftmaxColumns;
      T* pointers[N];
      for (size_t t = 0; t < N; ++t)
        pointers[t] = tensors[t]->template data<T>() + i / per_outer * n * stride + first;
      columns(pointers, stride, n, std::min(cpu::kSoftmaxColumns, stride - first));
    }
  });
}

/// Slices side by side are computed together where there are enough of them to fill packs.
template <class T, size_t N, class Row, class Columns>
void for_each_slice(const std::array<const Tensor*, N>& tensors, int dim, const Row& row,
                    const Columns& columns) {
  const Tensor& y = *tensors[0];
  const bool down = y.numel() > 0 && dim + 1 < y.dim() && y.strides()[dim] >= 8 &&
                    std::all_of(tensors.begin(), tensors.end(),
                                [](const Tensor* t) { return t->is_contiguous(); });
  if (down)
    for_each_column<T>(tensors, dim, columns);
  else
    for_each_row<T>(tensors, dim, row);
}

void softmax_cpu(const Tensor& y, const Tensor& x, int dim) {
  dispatch_floating("softmax", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice<T, 2>(
        {&y, &x}, dim,
        [](T* const* p, int64_t n) { cpu::softmax_rows<T>().softmax(p[1], p[0], n); },
        [](T* const* p, int64_t stride, int64_t n, int64_t count) {
          cpu::softmax_columns<T>().softmax(p[1], p[0], stride, n, count);
        });
  });
}
void log_softmax_cpu(const Tensor& y, const Tensor& x, int dim) {
  dispatch_floating("log_softmax", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice<T, 2>(
        {&y, &x}, dim,
        [](T* const* p, int64_t n) { cpu::softmax_rows<T>().log_softmax(p[1], p[0], n); },
        [](T* const* p, int64_t stride, int64_t n, int64_t count) {
          cpu::softmax_columns<T>().log_softmax(p[1], p[0], stride, n, count);
        });
  });
}
void softmax_backward_cpu(const Tensor& dx, const Tensor& y, const Tensor& dy, int dim) {
  dispatch_floating("softmax", y.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice<T, 3>(
        {&dx, &y, &dy}, dim,
        [](T* const* p, int64_t n) {
          cpu::softmax_rows<T>().softmax_backward(p[1], p[2], p[0], n);
        },
        [](T* const* p, int64_t stride, int64_t n, int64_t count) {
          cpu::softmax_columns<T>().softmax_backward(p[1], p[2], p[0], stride, n, count);
        });
  });
}
void log_softmax_backward_cpu(const Tensor& dx, const Tensor& y, const Tensor& dy, int dim) {
  dispatch_floating("log_softmax", y.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice<T, 3>(
        {&dx, &y, &dy}, dim,
        [](T* const* p, int64_t n) {
          cpu::softmax_rows<T>().log_softmax_backward(p[1], p[2], p[0], n);
        },
        [](T* const* p, int64_t stride, int64_t n, int64_t count) {
          cpu::softmax_columns<T>().log_softmax_backward(p[1], p[2], p[0], stride, n, count);
        });
  });
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim) {
  return apply(Softmax{wrap_dim("softmax", dim, x.dim())}, x);
}
Tensor log_softmax(const Tensor& x, int64_t dim) {
  return apply(LogSoftmax{wrap_dim("log_softmax", dim, x.dim())}, x);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, int)> softmax("softmax", softmax_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, int)> log_softmax("log_softmax",
                                                                      log_softmax_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> softmax_backward(
    "softmax", softmax_backward_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> log_softmax_backward(
    "log_softmax", log_softmax_backward_cpu);
}  // namespace kernels

}  // namespace lockstep

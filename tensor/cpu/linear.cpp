// linear on the CPU: products with bias and activation as an epilogue.
#include <lockstep/tensor/cpu/gemm.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

void linear_cpu(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b, bool relu) {
  dispatch_floating("linear", x.dtype(), [&]<class T>(TypeTag<T>) {
    cpu::MatrixRef<T> wt = cpu::matrix<T>(w);
    wt.transposed = !wt.transposed;
    cpu::gemm<T>(x.size(0), w.size(0), x.size(1), cpu::matrix<T>(x), wt, y.data<T>(), w.size(0),
                 false, {b.defined() ? b.data<T>() : nullptr, relu});
  });
}

/// dz = 0 where y <= 0, else dy; as relu, a NaN lets dy pass.
template <class T>
void relu_backward(const Tensor& dz, const Tensor& dy, const Tensor& y) {
  const T* __restrict g = dy.data<T>();
  const T* __restrict result = y.data<T>();
  T* __restrict z = dz.data<T>();
  parallel_for(dy.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T gradient = g[i];  // read in any case: a conditional load would prevent vector code
      z[i] = result[i] <= 0 ? T(0) : gradient;
    }
  });
}

void linear_backward_cpu(const Tensor& dx, const Tensor& dw, const Tensor& db, const Tensor& dy,
                         const Tensor& x, const Tensor& w, const Tensor& y) {
  const int64_t rows = dy.size(0), out = dy.size(1);
  dispatch_floating("linear", dy.dtype(), [&]<class T>(TypeTag<T>) {
    Tensor dz = dy;  // [R, out]
    if (y.defined()) {
      dz = empty(dy.shape(), {.dtype = dy.dtype()});
      relu_backward<T>(dz, dy, y);
    }
    if (db.defined()) reduction_kernel<reductions::Sum>()(db.view({1, out}), dz);
    if (dw.defined())
      cpu::gemm<T>(out, x.size(1), rows, {dz.data<T>(), out, true}, cpu::matrix<T>(x),
                   dw.data<T>(), x.size(1));
    if (dx.defined())
      cpu::gemm<T>(rows, w.size(1), out, {dz.data<T>(), out, false}, cpu::matrix<T>(w),
                   dx.data<T>(), w.size(1));
  });
}

const bool entered = kernels::linear.set(DeviceType::cpu, cpu::Widened<linear_cpu, 1>::run, dtypes::kFloating) &&
                     kernels::linear_backward.set(DeviceType::cpu, cpu::Widened<linear_backward_cpu, 3>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep

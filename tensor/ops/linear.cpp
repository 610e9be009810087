#include <lockstep/tensor/ops/linear.h>

#include <lockstep/tensor/cpu/gemm.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

void linear_cpu(const Tensor& x, const Tensor& w, const Tensor& bias, bool relu, const Tensor& y) {
  const Tensor wm = cpu::is_matrix(w) ? w : w.contiguous();
  const Tensor b = bias.defined() ? bias.contiguous() : bias;
  dispatch_floating("linear", x.dtype(), [&]<class T>(TypeTag<T>) {
    cpu::MatrixRef<T> wt = cpu::matrix<T>(wm);
    wt.transposed = !wt.transposed;
    cpu::gemm<T>(x.size(0), w.size(0), x.size(1), cpu::matrix<T>(x), wt, y.data<T>(), w.size(0),
                 false, {b.defined() ? b.data<T>() : nullptr, relu});
  });
}

/// dz = 0 where y <= 0, else dy.
void relu_backward_cpu(const Tensor& dy, const Tensor& y, const Tensor& dz) {
  dispatch_floating("linear", dy.dtype(), [&]<class T>(TypeTag<T>) {
    const T* __restrict g = dy.data<T>();
    const T* __restrict result = y.data<T>();
    T* __restrict z = dz.data<T>();
    parallel_for(dy.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T gradient = g[i];  // read in any case: a conditional load would prevent vector code
        z[i] = result[i] <= 0 ? T(0) : gradient;  // as relu: NaN lets dy pass
      }
    });
  });
}

/// On rows: x [R, in], W [out, in], b [out]; the result has `shape`, whose rows are those.
/// dz = dy where not y <= 0,  dx = dz W,  dW = dz^T x,  db = sum_rows dz.
struct Linear {
  static constexpr const char* name = "linear";
  static constexpr Precision precision = Precision::lower;
  static inline Kernel<void(const Tensor&, const Tensor&, const Tensor&, bool, const Tensor&)>
      kernel{"linear", linear_cpu};
  static inline Kernel<void(const Tensor&, const Tensor&, const Tensor&)> relu_backward{
      "linear", relu_backward_cpu};
  bool relu;
  Shape shape;
  Shape rows;  // [R, out]
  // Without relu the output is not kept: the next op may then work on it in place.
  unsigned saves_for(int i) const {
    return (i == 0 ? kInput(1) : i == 1 ? kInput(0) : 0) | (relu ? kOutput : 0);
  }

  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& b) const {
    Tensor y = empty(shape, {.dtype = x.dtype(), .device = x.device()});
    kernel.on(x.device())(x, w, b, relu, y);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if (is_grad_enabled()) {
      const Tensor dz = (relu ? where(le(saved.output(), 0), 0, dy) : dy).reshape(rows);
      if (dx.needed(0)) dx.set(0, lockstep::matmul(dz, saved.input(1)));
      if (dx.needed(1)) dx.set(1, lockstep::matmul(dz.t(), saved.input(0)));
      if (dx.needed(2)) dx.set(2, dz.sum({0}));
      return;
    }
    const TensorOptions like{.dtype = dy.dtype(), .device = dy.device()};
    const Tensor g = dy.contiguous().view(rows);
    const Tensor dz = relu ? empty(g.shape(), like) : g;
    if (relu) relu_backward.on(g.device())(g, saved.output().view(rows), dz);
    if (dx.needed(2)) {
      const Tensor db = dx.destination(2).defined() ? dx.destination(2) : empty({g.size(1)}, like);
      kernels::sum.on(g.device())(db.view({1, db.size(0)}), dz, 1);
      dx.set(2, db);
    }
    if (dx.needed(1)) {
      const Tensor x = saved.input(0);  // [R, in]
      Tensor dw = dx.destination(1).defined() ? dx.destination(1)
                                              : empty({rows[1], x.size(1)}, like);
      detail::matmul_kernel().on(g.device())(dz.t(), x, dw);
      dx.set(1, dw);
    }
    if (dx.needed(0)) {
      const Tensor w = saved.input(1);  // [out, in]
      Tensor din = empty({rows[0], w.size(1)}, like);
      detail::matmul_kernel().on(g.device())(dz, w, din);
      dx.set(0, din);
    }
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation) {
  LOCKSTEP_CHECK(weight.dim() == 2, ShapeError, "linear: the weight must be [out, in], got ",
                 weight.shape());
  LOCKSTEP_CHECK(
      x.dim() >= 1 && x.size(-1) == weight.size(1), ShapeError, "linear: input ", x.shape(),
      " has ", x.dim() ? x.size(-1) : 0, " features, the weight ", weight.shape(), " expects ",
      weight.size(1),
      x.dim() > 2 && x.size(0) * weight.size(1) == x.numel() ? "; did you forget flatten(1)?" : "");
  LOCKSTEP_CHECK(x.dtype() == weight.dtype(), DTypeError, "linear: the input is ", x.dtype(),
                 ", the weight ", weight.dtype(), "; convert one with to()");
  LOCKSTEP_CHECK(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), ShapeError,
                 "linear: the bias must be [", weight.size(0), "], got ",
                 bias.defined() ? bias.shape() : Shape{});
  LOCKSTEP_CHECK(!bias.defined() || bias.dtype() == x.dtype(), DTypeError, "linear: the input is ",
                 x.dtype(), ", the bias ", bias.dtype(), "; convert one with to()");
  int64_t count = 1;  // of rows; a -1 in reshape could not tell it from no features
  for (int i = 0; i + 1 < x.dim(); ++i) count *= x.shape()[i];
  const Tensor rows =
      x.dim() == 2 && cpu::is_matrix(x) ? x : x.contiguous().reshape({count, x.size(-1)});
  Shape shape = x.shape();
  shape[x.dim() - 1] = weight.size(0);
  return apply(Linear{activation == Activation::relu, shape, {count, weight.size(0)}}, rows, weight, bias);
}

}  // namespace lockstep

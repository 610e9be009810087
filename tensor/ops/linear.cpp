#include <lockstep/tensor/ops/linear.h>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {
namespace {

/// On rows: x [R, in], W [out, in], b [out]; the result has `shape`, whose rows are those.
/// dz = dy where not y <= 0,  dx = dz W,  dW = dz^T x,  db = sum_rows dz.
struct Linear {
  static constexpr const char* name = "linear";
  static constexpr Precision precision = Precision::lower;
  bool relu;
  Shape shape;
  Shape rows;  // [R, out]
  // Without relu the output is not kept: the next op may then work on it in place.
  unsigned saves_for(int i) const {
    return (i == 0 ? kInput(1) : i == 1 ? kInput(0) : 0) | (relu ? kOutput : 0);
  }

  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& b) const {
    Tensor y = empty(shape, {.dtype = x.dtype(), .device = x.device()});
    kernels::linear(y, x, w, b, relu);
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
    const TensorOptions options{.dtype = dy.dtype(), .device = dy.device()};
    const auto place = [&](int i, const Shape& shape) {
      if (!dx.needed(i)) return Tensor();
      const Tensor given = dx.destination(i);
      return given.defined() ? given : empty(shape, options);
    };
    const Tensor x = dx.needed(1) ? saved.input(0) : Tensor();  // [R, in]
    const Tensor w = dx.needed(0) ? saved.input(1) : Tensor();  // [out, in]
    const Tensor din = w.defined() ? empty({rows[0], w.size(1)}, options) : Tensor();
    const Tensor dw = x.defined() ? place(1, {rows[1], x.size(1)}) : Tensor(),
                 db = place(2, {rows[1]});
    kernels::linear_backward(din, dw, db, dy.contiguous().view(rows), x, w,
                             relu ? saved.output().view(rows) : Tensor());
    if (db.defined()) dx.set(2, db);
    if (dw.defined()) dx.set(1, dw);
    if (din.defined()) dx.set(0, din);
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
      x.dim() == 2 && detail::is_matrix(x) ? x : x.contiguous().reshape({count, x.size(-1)});
  Shape shape = x.shape();
  shape[x.dim() - 1] = weight.size(0);
  return apply(Linear{activation == Activation::relu, shape, {count, weight.size(0)}}, rows,
               detail::is_matrix(weight) ? weight : weight.contiguous(),
               bias.defined() ? bias.contiguous() : bias);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)> linear(
    "linear");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&)>
    linear_backward("linear", "_backward");
}  // namespace kernels

}  // namespace lockstep

#include <lockstep/tensor/ops/take_along.h>

#include <lockstep/tensor/op.h>

namespace lockstep {
namespace {

struct TakeAlong {
  static constexpr const char* name = "take_along";
  static constexpr unsigned saves = kInput(1);
  int dim;
  Shape from = {};
  Tensor forward(const Tensor& x, const Tensor& indices) {
    from = x.shape();
    Tensor y = empty(indices.shape(), {.dtype = x.dtype(), .device = x.device()});
    kernels::take_along(y, x, indices, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, put_along(dy, saved.input(1), dim, from));
  }
};

struct PutAlong {
  static constexpr const char* name = "put_along";
  static constexpr unsigned saves = kInput(1);
  int dim;
  Shape shape;
  Tensor forward(const Tensor& x, const Tensor& indices) const {
    Tensor y = zeros(shape, {.dtype = x.dtype(), .device = x.device()});
    kernels::put_along(y, x, indices, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, take_along(dy, saved.input(1), dim));
  }
};

/// Throws unless indices can pick one element of each slice of a tensor of `shape`; returns `dim`
/// counted from the front.
int checked_dim(const char* op, const Shape& shape, const Tensor& indices, int dim) {
  const int d = wrap_dim(op, dim, shape.dims());
  Shape expected = shape;
  if (!shape.empty()) expected[d] = 1;
  LOCKSTEP_CHECK(indices.dtype() == DType::i64, DTypeError, op, ": indices are i64, got ",
                 indices.dtype(), "; convert with to(DType::i64)");
  LOCKSTEP_CHECK(indices.shape() == expected, ShapeError, op, ": dimension ", dim, " of ", shape,
                 " needs indices of shape ", expected, ", got ", indices.shape());
  return d;
}

}  // namespace

Tensor take_along(const Tensor& x, const Tensor& indices, int dim) {
  return apply(TakeAlong{checked_dim("take_along", x.shape(), indices, dim)}, x, indices);
}
Tensor put_along(const Tensor& x, const Tensor& indices, int dim, const Shape& shape) {
  const int d = checked_dim("put_along", shape, indices, dim);
  LOCKSTEP_CHECK(x.shape() == indices.shape(), ShapeError,
                 "put_along: the input and the indices have one shape, got ", x.shape(), " and ",
                 indices.shape());
  return apply(PutAlong{d, shape}, x, indices);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> take_along("take_along");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> put_along("put_along");
}  // namespace kernels

}  // namespace lockstep

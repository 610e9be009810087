#include <lockstep/tensor/ops/take_along.h>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/parallel.h>

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
    kernels::take_along.on(x.device())(y, x, indices, dim);
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
    kernels::put_along.on(x.device())(y, x, indices, dim);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, take_along(dy, saved.input(1), dim));
  }
};

/// Calls f(offset in one, offset in many) for every element of `one`, whose size at `dim` is 1.
template <class F>
void for_each_slice(const char* op, const Tensor& one, const Tensor& many, const Tensor& indices,
                    int dim, const F& f) {
  const int dims = one.dim();
  const int64_t size = dims ? many.shape()[dim] : 1, stride = dims ? many.strides()[dim] : 0;
  const int64_t* index = indices.data<int64_t>();
  parallel_for(one.numel(), 1 << 13, [&](int64_t begin, int64_t end) {
    Shape place = Shape::filled(dims, 0);
    int64_t in_one = 0, in_many = 0, in_indices = 0;
    const auto move = [&](int d, int64_t steps) {
      place[d] += steps;
      in_one += steps * one.strides()[d];
      in_many += steps * many.strides()[d];
      in_indices += steps * indices.strides()[d];
    };
    int64_t rest = begin;
    for (int d = dims; d-- > 0; rest /= one.shape()[d]) move(d, rest % one.shape()[d]);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t k = index[in_indices];
      LOCKSTEP_CHECK(k >= 0 && k < size, IndexError, op, ": indices are in [0, ", size,
                     "), the size of dimension ", dim, "; got ", k);
      f(in_one, in_many + k * stride);
      for (int d = dims; d-- > 0;) {
        move(d, 1);
        if (place[d] < one.shape()[d]) break;
        move(d, -place[d]);
      }
    }
  });
}

void take_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  dispatch("take_along", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice("take_along", y, x, indices, dim,
                   [to = y.data<T>(), from = x.data<T>()](int64_t one, int64_t many) {
                     to[one] = from[many];
                   });
  });
}
void put_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  dispatch("put_along", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice("put_along", x, y, indices, dim,
                   [to = y.data<T>(), from = x.data<T>()](int64_t one, int64_t many) {
                     to[many] = from[one];
                   });
  });
}

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
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> take_along("take_along",
                                                                                    take_along_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> put_along("put_along",
                                                                                   put_along_cpu);
}  // namespace kernels

}  // namespace lockstep

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

/// Calls f(offset in one, offset in many, index) for every element of `one`, whose size at `dim`
/// is 1.
template <class F>
void for_each_slice(const Tensor& one, const Tensor& many, const Tensor& indices, int dim, F&& f) {
  const int64_t n = one.numel();
  const Strides counting = contiguous_strides(one.shape());
  const int64_t* index = indices.data<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    int64_t at_one = 0, at_many = 0, at_index = 0;
    for (int d = 0; d < one.dim(); ++d) {
      const int64_t k = i / counting[d] % one.shape()[d];
      at_one += k * one.strides()[d];
      at_many += k * many.strides()[d];
      at_index += k * indices.strides()[d];
    }
    f(at_one, at_many + index[at_index] * (many.dim() ? many.strides()[dim] : 0));
  }
}

void take_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  dispatch("take_along", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice(y, x, indices, dim,
                   [to = y.data<T>(), from = x.data<T>()](int64_t one, int64_t many) {
                     to[one] = from[many];
                   });
  });
}
void put_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  dispatch("put_along", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice(x, y, indices, dim,
                   [to = y.data<T>(), from = x.data<T>()](int64_t one, int64_t many) {
                     to[many] = from[one];
                   });
  });
}

}  // namespace

Tensor take_along(const Tensor& x, const Tensor& indices, int dim) {
  return apply(TakeAlong{dim}, x, indices);
}
Tensor put_along(const Tensor& x, const Tensor& indices, int dim, const Shape& shape) {
  return apply(PutAlong{dim, shape}, x, indices);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> take_along("take_along",
                                                                                    take_along_cpu);
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, int)> put_along("put_along",
                                                                                   put_along_cpu);
}  // namespace kernels

}  // namespace lockstep

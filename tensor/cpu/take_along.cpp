// take_along and put_along on the CPU: one index for each slice.
#include <lockstep/tensor/ops/take_along.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

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
  dispatch_any(x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice("take_along", y, x, indices, dim,
                   [to = y.data<T>(), from = x.data<T>()](int64_t one, int64_t many) {
                     to[one] = from[many];
                   });
  });
}
void put_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  dispatch_any(x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_slice("put_along", x, y, indices, dim,
                   [to = y.data<T>(), from = x.data<T>()](int64_t one, int64_t many) {
                     to[many] = from[one];
                   });
  });
}

const bool entered = kernels::take_along.set(DeviceType::cpu, take_along_cpu, dtypes::kAll) &&
                     kernels::put_along.set(DeviceType::cpu, put_along_cpu, dtypes::kAll);

}  // namespace
}  // namespace lockstep

// Where the largest element of each slice stands. Along memory the value is found first, many lanes
// at a time, and then its first place; NaN counts as the largest.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

template <class T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>)
    return x != x;
  else
    return false;
}

template <class T>
int64_t argmax_strided(const T* x, int64_t stride, int64_t n) {
  T largest = x[0];
  int64_t at = 0;
  for (int64_t i = 1; i < n; ++i) {
    const T v = x[i * stride];
    const bool better = !(v <= largest) & !is_nan(largest);  // a NaN is better than any number
    largest = better ? v : largest;
    at = better ? i : at;
  }
  return at;
}

template <class T>
int64_t argmax_row(const T* x, int64_t n) {
  constexpr int kLanes = 32;
  if (n < 2 * kLanes) return argmax_strided(x, 1, n);
  T lanes[kLanes];
  int odd[kLanes] = {};
  std::copy_n(x, kLanes, lanes);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
      odd[l] |= is_nan(x[i + l]);
    }
  T largest = *std::max_element(lanes, lanes + kLanes);
  bool has_nan = std::any_of(odd, odd + kLanes, [](int o) { return o != 0; });
  for (; i < n; ++i) {
    largest = std::max(largest, x[i]);
    has_nan |= is_nan(x[i]);
  }
  return has_nan ? std::find_if(x, x + n, is_nan<T>) - x : std::find(x, x + n, largest) - x;
}

void argmax_cpu(const Tensor& indices, const Tensor& x, int dim) {
  const int64_t n = x.shape()[dim], stride = x.strides()[dim];
  dispatch("argmax", x.dtype(), [&]<class T>(TypeTag<T>) {
    const T* from = x.data<T>();
    int64_t* to = indices.data<int64_t>();
    parallel_for(indices.numel(), std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t offset = 0;
        for (int d = 0; d < x.dim(); ++d)
          if (d != dim) offset += i / indices.strides()[d] % x.shape()[d] * x.strides()[d];
        to[i] =
            stride == 1 ? argmax_row(from + offset, n) : argmax_strided(from + offset, stride, n);
      }
    });
  });
}

const bool entered = kernels::argmax.set(DeviceType::cpu, cpu::Widened<argmax_cpu, 1>::run, dtypes::kAll);

}  // namespace
}  // namespace lockstep

// Scaling by a number, for averages: in place, in the dtype's arithmetic, f16 and bf16 rounded once.
#pragma once

#include <cstddef>

#include <lockstep/tensor/dtype.h>
#include <lockstep/tensor/half.h>

namespace lockstep::dist {

namespace detail {
template <class T, class Wide>
void scale_as(std::byte* data, size_t n, double factor) {
  auto* x = reinterpret_cast<T*>(data);
  for (size_t i = 0; i < n; ++i)
    x[i] = static_cast<T>(static_cast<Wide>(x[i]) * static_cast<Wide>(factor));
}
}  // namespace detail

/// data[i] *= factor for n elements of a floating dtype.
inline void scale(DType dtype, std::byte* data, size_t n, double factor) {
  if (dtype == DType::f64) return detail::scale_as<double, double>(data, n, factor);
  if (dtype == DType::f16) return detail::scale_as<Half, float>(data, n, factor);
  if (dtype == DType::bf16) return detail::scale_as<BFloat16, float>(data, n, factor);
  detail::scale_as<float, float>(data, n, factor);
}

}  // namespace lockstep::dist

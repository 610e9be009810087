// window_count: the output size of convolution and pooling along one dimension, without overflow.
#pragma once

#include <cstdint>
#include <limits>

#include <lockstep/tensor/error.h>

namespace lockstep::detail {

/// How many windows of `kernel` elements, `dilation` apart, fit into `size` elements with `pad` more at
/// either end, when each begins `stride` after the one before; 0 where none fits. All arguments are
/// positive, size and pad may be 0. ShapeError: positions in the padded input do not fit in 64 bits.
inline int64_t window_count(const char* op, int64_t size, int64_t kernel, int64_t stride,
                            int64_t pad, int64_t dilation) {
  const auto padded = static_cast<__int128>(size) + 2 * static_cast<__int128>(pad);
  const auto extent = static_cast<__int128>(dilation) * (kernel - 1) + 1;  // of one window
  if (padded < extent) return 0;
  LOCKSTEP_CHECK(padded <= std::numeric_limits<int64_t>::max(), ShapeError, op, ": a size of ", size,
                 " with a padding of ", pad, " at either end is beyond 2^63 - 1");
  return static_cast<int64_t>((padded - extent) / stride + 1);
}

}  // namespace lockstep::detail

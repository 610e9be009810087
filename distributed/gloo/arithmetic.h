// The arithmetic of reductions over Gloo: element-wise functions as Gloo calls them, and the
// conversions of the two-byte floats around them. f16 travels and adds up as f16, after it was
// scaled by 1/W; bf16, which Gloo does not know, travels as f32 and is rounded once.
#pragma once

#include <cstddef>
#include <functional>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist::gloo_backend {

/// out[i] = a[i] op b[i]; out may be a or b. avg adds: the scaling is apart.
using Combine = std::function<void(void* out, const void* a, const void* b, size_t n)>;
Combine combine_function(DType dtype, ReduceOp op);

/// Between a two-byte float and f32.
void widen(DType dtype, const std::byte* from, float* to, size_t n);
void narrow(DType dtype, const float* from, std::byte* to, size_t n);

}  // namespace lockstep::dist::gloo_backend

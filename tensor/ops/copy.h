// The kernels behind copy_, clone, contiguous, to and fill_, without graph or version counting, and
// the test for overlapping memory that in-place ops need.
#pragma once

#include <lockstep/tensor/formula.h>
#include <lockstep/tensor/tensor.h>

namespace lockstep::detail {

/// dst = src, element by element: src broadcasts to dst's shape and converts to its dtype as
/// cast_element does. Any strides; the two must not overlap.
LOCKSTEP_API void copy_kernel(const Tensor& dst, const Tensor& src);
/// Every element of t = value, converted to t's dtype.
LOCKSTEP_API void fill_kernel(const Tensor& t, Number value);
/// Whether a and b share memory but differ in layout, so that writing to one may change elements of
/// the other that have not been read yet.
LOCKSTEP_API bool overlaps(const Tensor& a, const Tensor& b);

}  // namespace lockstep::detail

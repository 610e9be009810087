// The kernels behind copy_, clone, contiguous, to, fill_ and arange, without graph or version counting, and
// the test for overlapping memory that in-place ops need.
#pragma once

#include <lockstep/tensor/kernel.h>

namespace lockstep {

namespace kernels {
/// dst = src, element by element: src broadcasts to dst's shape and converts to its dtype as
/// cast_element does. Any strides; the two must not overlap.
LOCKSTEP_API extern Kernel<void(const Tensor& dst, const Tensor& src)> copy;
/// Copies between a device and the host's memory, both dense in the same order and of one dtype. The
/// source may change as soon as upload has returned; download waits until dst is complete.
LOCKSTEP_API extern Kernel<void(const Tensor& dst, const OnHost& src)> upload;
LOCKSTEP_API extern Kernel<void(const OnHost& dst, const Tensor& src)> download;
/// Every element of t = value, converted to t's dtype.
LOCKSTEP_API extern Kernel<void(const Tensor& t, Number value)> fill;
/// t (1-d, row-major) = start, start + step, ..., converted to t's dtype.
LOCKSTEP_API extern Kernel<void(const Tensor& t, int64_t start, int64_t step)> arange;
}  // namespace kernels

namespace detail {
/// Whether the elements fill one block of memory without gaps or repeats, in any order of dimensions.
LOCKSTEP_API bool is_dense(const Tensor& t);
/// Whether a and b share memory but differ in layout, so that writing to one may change elements of
/// the other that have not been read yet.
LOCKSTEP_API bool overlaps(const Tensor& a, const Tensor& b);
}  // namespace detail

}  // namespace lockstep

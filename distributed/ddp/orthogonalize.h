// Columns of a matrix made orthonormal, and drawn anew where they are zeros: the two things that
// PowerSGD does with its thin matrices. In f64 inside; the same on all ranks.
#pragma once

#include <lockstep/tensor/random.h>

namespace lockstep::dist {

/// Gram-Schmidt on the columns of a [rows, columns], f32 or f64, in place. Each is divided by its
/// norm plus epsilon; one that nothing is left of becomes zeros.
LOCKSTEP_API void orthogonalize(const Tensor& a, double epsilon);

/// Puts normal numbers, which depend on the key alone, into the columns of a that are zeros.
LOCKSTEP_API void draw_zero_columns(const Tensor& a, RandomKey key);

}  // namespace lockstep::dist

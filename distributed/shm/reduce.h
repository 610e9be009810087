// The arithmetic of reductions: the same piece of every rank's buffer, combined in rank order, and
// the result written wherever it is wanted. So all ranks hold the same bits, whichever rank reduced
// them.
#pragma once

#include <cstddef>
#include <span>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

/// Throws DTypeError when `op` has no meaning for `dtype`: avg of integers, bitwise ops of floats,
/// sums of bools (max is "any", min is "all").
void check_reducible(std::string_view collective, ReduceOp op, DType dtype);

/// Combines `count` elements of the buffers `from` (by rank) into each of `to`, which are some of
/// the same buffers, or all. f16 and bf16 are widened to f32, combined there and rounded once. NaN
/// in gives NaN out.
void reduce_into(std::span<std::byte* const> from, std::span<std::byte* const> to, size_t count,
                 DType dtype, ReduceOp op);

}  // namespace lockstep::dist

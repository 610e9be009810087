// The arithmetic of all_reduce: the same piece of every rank's buffer, combined in rank order, and
// the result written into every one of them. So all ranks hold the same bits, whoever did the work.
#pragma once

#include <cstddef>
#include <span>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

/// Throws DTypeError when `op` has no meaning for `dtype`: avg of integers, bitwise ops of floats,
/// sums of bools (max is "any", min is "all").
void check_reducible(std::string_view collective, ReduceOp op, DType dtype);

/// Combines `count` elements of each buffer (by rank) in place; all end up equal. NaN in gives NaN
/// out.
void reduce_everywhere(std::span<std::byte* const> buffers, size_t count, DType dtype, ReduceOp op);

}  // namespace lockstep::dist

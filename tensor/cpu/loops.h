// LoopPlan: the traversal of tensors by element-wise kernels. It handles broadcasting, strides and
// memory order, so that a kernel gets only rows: a count and, for each operand, a pointer and a
// stride in bytes.
#pragma once

#include <cstdint>

#include <lockstep/tensor/kernel.h>

namespace lockstep::cpu {

/// An element-wise traversal of up to kMaxOperands tensors of one (broadcast) shape. Operand 0 is
/// the result. Dimensions are reordered to the result's memory order, and merged where strides
/// allow.
struct LoopPlan {
  static constexpr int kMaxOperands = static_cast<int>(Operands::kMost);
  int operands = 0;
  int dims = 0;                                    // after merging; at least 1
  int64_t sizes[Shape::kMaxDims];                  // innermost first
  int64_t strides[kMaxOperands][Shape::kMaxDims];  // in bytes, innermost first
  char* data[kMaxOperands];

  /// `keep_order` traverses in logical row-major order of the result (for random ops).
  static LoopPlan make(const Operands& operands, bool keep_order = false);
  int64_t numel() const;

  /// Calls row(context, pointers, byte strides, count, first) for pieces of rows that cover the
  /// plan, in parallel for large ones. Pieces depend on the plan alone; `first` is the index in
  /// traversal order of the piece's first element.
  using Row = void (*)(void* context, char* const* data, const int64_t* strides, int64_t count,
                       int64_t first);
  void run(void* context, Row row) const;

  /// The same in two dimensions: `rows` rows of `count` elements, for kernels that process several
  /// short rows at a time. strides[k] are operand k's, within a row and from row to row; `count` is
  /// less than a whole row only where rows is 1.
  struct Step {
    int64_t inner, outer;
  };
  using Block = void (*)(void* context, char* const* data, const Step* strides, int64_t count,
                         int64_t rows, int64_t first);
  void run_blocks(void* context, Block block) const;
};

}  // namespace lockstep::cpu

// The kernels of an element-wise op: one for the formula and one per derivative.
#pragma once

#include <array>

#include <lockstep/tensor/kernel.h>
#include <lockstep/tensor/ops/formula_traits.h>

namespace lockstep {

/// How many derivative kernels an op has; where's derivatives are wheres.
template <class Op>
inline constexpr size_t kDerivatives = [] {
  if constexpr (requires { Op::inputs; })
    return Op::predicate ? 0 : Op::inputs;
  else
    return 0;
}();

/// A kernel's operands: the result, which broadcasts the others to its shape, then
/// - forward: the op's inputs, all of one dtype (where: the bool condition before them);
/// - derivative by input I: dy, then of the inputs and y those that formulas::reads<Op, I> names.
template <class Op>
struct ElementwiseTable {
  using RowsKernel = Kernel<void(const Operands& operands, const Op& op)>;
  RowsKernel forward;
  std::array<RowsKernel, kDerivatives<Op>> derivative;
};

/// The table of an op of the lists in formulas-inl.h, or of Where.
template <class Op>
LOCKSTEP_API ElementwiseTable<Op>& elementwise_table();

}  // namespace lockstep

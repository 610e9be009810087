// The CPU's element-wise kernels. A kernel gets n elements that are contiguous in every operand;
// run_rows handles strides, broadcasting and threads, so there is one loop per op and dtype.
#pragma once

#include <cstdint>
#include <tuple>

#include <lockstep/tensor/kernel.h>
#include <lockstep/tensor/ops/formula_traits.h>

namespace lockstep::cpu {

/// data[0] is the result; `first` is the first element's index in traversal order, for random ops.
using Row = void (*)(const void* op, char* const* data, int64_t n, int64_t first);

/// f32 and f64 kernels of one op, at the processor's best instruction set. A derivative's operands
/// are dx, dy, then of a, b, c and y those that it reads.
template <class Op>
struct FloatKernels {
  Row forward[2];
  Row derivative[2][Op::inputs];
};
template <class L>
struct FloatTableOf;
template <class... Ops>
struct FloatTableOf<List<Ops...>> {
  using type = std::tuple<FloatKernels<Ops>...>;
};
template <class L>
using FloatTable = typename FloatTableOf<L>::type;

const FloatTable<formulas::UnaryOps>& unary_kernels();
const FloatTable<formulas::ManyOperandOps>& many_operand_kernels();
/// Operands y, x; by dtype f32, f64.
Row dropout_kernel(DType dtype);

/// Kernels without explicit SIMD: integers, bool, comparisons. Null where the op's domain excludes
/// t.
template <class Op>
Row scalar_kernel(DType t);
/// Operands y, condition, a, b.
Row where_kernel(DType t);

/// Runs a row kernel over tensors of one (broadcast) shape; operands[0] is the result.
/// `logical_order` makes `first` the element's row-major index whatever the memory order.
void run_rows(Row row, const void* op, const Operands& operands, bool logical_order = false);

}  // namespace lockstep::cpu

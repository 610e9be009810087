// run_rows, which calls a row kernel on operands of any strides, and the CPU's entries in the ops' tables.
#include <lockstep/tensor/cpu/elementwise.h>

#include <algorithm>
#include <array>
#include <cstring>

#include <lockstep/tensor/cpu/convert_rows.h>
#include <lockstep/tensor/cpu/loops.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/elementwise_table.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::cpu {
namespace {

constexpr int64_t kPiece = 32768;  // as LoopPlan cuts long rows
constexpr int64_t kBuffer = 256;   // elements of a strided operand that are gathered at a time

struct Walk {
  Row row;
  const void* op;
  int operands;
  DType dtypes[LoopPlan::kMaxOperands];  // in memory; rows compute f16 and bf16 in f32
};

/// Whether all operands are dense in the same order and computed as they are, so that they are one row.
bool one_row(const Operands& operands, bool logical_order) {
  const Tensor& y = operands[0];
  const TensorBody& result = y.body();
  for (const Tensor* t : operands.all()) {
    const TensorBody& b = t->body();
    if (is_half(b.dtype)) return false;
    if (&b != &result &&
        (b.shape != result.shape ||
         (b.strides != result.strides && !(t->is_contiguous() && y.is_contiguous()))))
      return false;
  }
  return y.is_contiguous() || (!logical_order && y.is_channels_last());
}

using Step = LoopPlan::Step;

/// Gathers `rows` rows of n strided elements into a dense buffer, or scatters them back.
template <size_t kBytes, bool kScatter>
void regroup_as(char* strided, Step step, char* dense, int64_t n, int64_t rows) {
  constexpr int64_t bytes = kBytes;
  for (int64_t r = 0; r < rows; ++r, strided += step.outer, dense += n * bytes) {
    if constexpr (kScatter) {
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(strided + i * step.inner, dense + i * bytes, kBytes);
    } else if (step.inner == 0) {
      char value[kBytes];
      std::memcpy(value, strided, kBytes);
      for (int64_t i = 0; i < n; ++i) std::memcpy(dense + i * bytes, value, kBytes);
    } else {
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(dense + i * bytes, strided + i * step.inner, kBytes);
    }
  }
}
/// The same between elements of T in memory and floats in the buffer; at most kBuffer of them.
template <class T, bool kScatter>
void regroup_half(char* strided, Step step, char* dense, int64_t n, int64_t rows) {
  T gathered[kBuffer];
  char* const bytes = reinterpret_cast<char*>(gathered);
  float* const wide = reinterpret_cast<float*>(dense);
  if constexpr (kScatter) {
    convert_rows()(wide, gathered, n * rows);
    regroup_as<sizeof(T), true>(strided, step, bytes, n, rows);
  } else {
    regroup_as<sizeof(T), false>(strided, step, bytes, n, rows);
    convert_rows()(gathered, wide, n * rows);
  }
}
template <bool kScatter>
void regroup(char* strided, Step step, DType t, char* dense, int64_t n, int64_t rows) {
  if (t == DType::f16) return regroup_half<Half, kScatter>(strided, step, dense, n, rows);
  if (t == DType::bf16) return regroup_half<BFloat16, kScatter>(strided, step, dense, n, rows);
  switch (size_of(t)) {
    case 8:
      return regroup_as<8, kScatter>(strided, step, dense, n, rows);
    case 4:
      return regroup_as<4, kScatter>(strided, step, dense, n, rows);
    case 2:
      return regroup_as<2, kScatter>(strided, step, dense, n, rows);
    default:
      return regroup_as<1, kScatter>(strided, step, dense, n, rows);
  }
}

/// A block whose operands are not all dense, or not in the dtype that the row computes in: the others are
/// copied through small dense buffers, some rows at a time, so that the same kernel computes every
/// layout, bit for bit. An operand that
/// all rows repeat is read once; one that is constant within rows once per row.
void buffered_block(const Walk& walk, char* const* data, const Step* steps, int64_t n, int64_t rows,
                    int64_t first) {
  alignas(64) char buffers[LoopPlan::kMaxOperands][kBuffer * 8];
  const int64_t group = std::max<int64_t>(1, std::min(rows, kBuffer / n)),
                width = std::min(n, kBuffer);
  bool dense[LoopPlan::kMaxOperands], fixed[LoopPlan::kMaxOperands];
  for (int k = 0; k < walk.operands; ++k) {
    const int64_t bytes = static_cast<int64_t>(size_of(walk.dtypes[k]));
    dense[k] = !is_half(walk.dtypes[k]) && steps[k].inner == bytes &&
               (group == 1 || steps[k].outer == n * bytes);
    fixed[k] = !dense[k] && k > 0 && (steps[k].outer == 0 || rows == 1) &&
               (steps[k].inner == 0 || n <= kBuffer);
    if (fixed[k]) regroup<false>(data[k], steps[k], walk.dtypes[k], buffers[k], width, group);
  }
  for (int64_t r = 0; r < rows; r += group)
    for (int64_t i = 0; i < n; i += kBuffer) {
      const int64_t m = std::min(width, n - i), height = std::min(group, rows - r);
      char *at[LoopPlan::kMaxOperands], *strided[LoopPlan::kMaxOperands];
      for (int k = 0; k < walk.operands; ++k) {
        strided[k] = data[k] + r * steps[k].outer + i * steps[k].inner;
        at[k] = dense[k] ? strided[k] : buffers[k];
        if (k > 0 && !dense[k] && !fixed[k] && (i == 0 || steps[k].inner != 0))
          regroup<false>(strided[k], steps[k], walk.dtypes[k], at[k], m, height);
      }
      walk.row(walk.op, at, m * height, first + r * n + i);
      if (!dense[0]) regroup<true>(strided[0], steps[0], walk.dtypes[0], at[0], m, height);
    }
}

void planned_block(void* context, char* const* data, const Step* steps, int64_t n, int64_t rows,
                   int64_t first) {
  const Walk& walk = *static_cast<const Walk*>(context);
  bool dense = n >= kBuffer / 2 || rows == 1;
  for (int k = 0; k < walk.operands; ++k)
    dense &= !is_half(walk.dtypes[k]) &&
             steps[k].inner == static_cast<int64_t>(size_of(walk.dtypes[k]));
  if (!dense) return buffered_block(walk, data, steps, n, rows, first);
  char* at[LoopPlan::kMaxOperands];
  for (int64_t r = 0; r < rows; ++r) {
    for (int k = 0; k < walk.operands; ++k) at[k] = data[k] + r * steps[k].outer;
    walk.row(walk.op, at, n, first + r * n);
  }
}

/// Whether an operand runs across the result's memory, as a transpose does: then a copy in the
/// result's order, made in strips, is cheaper than reading a cache line per element.
bool runs_across(const LoopPlan& plan, int k) {
  for (int d = 1; d < plan.dims; ++d)
    if (plan.strides[k][d] != 0 && plan.strides[k][d] < plan.strides[k][0] &&
        plan.strides[k][0] >= 64)
      return true;
  return false;
}

void run_planned(Walk& walk, const Operands& operands, bool logical_order) {
  LoopPlan plan = LoopPlan::make(operands, logical_order);
  Operands replaced = operands;
  std::array<Tensor, Operands::kMost> copies;
  bool changed = false;
  for (size_t k = 1; k < operands.size(); ++k) {
    const Tensor &t = operands[k], &y = operands[0];
    if (t.shape() != y.shape() || !runs_across(plan, static_cast<int>(k))) continue;
    copies[k] =
        empty_strided(y.shape(), y.is_channels_last() ? y.strides() : contiguous_strides(y.shape()),
                      {.dtype = t.dtype(), .device = t.device()});
    kernels::copy(copies[k], t);
    replaced.replace(k, copies[k]);
    changed = true;
  }
  if (changed) plan = LoopPlan::make(replaced, logical_order);
  plan.run_blocks(&walk, planned_block);
}

}  // namespace

void run_rows(Row row, const void* op, const Operands& operands, bool logical_order) {
  const size_t count = operands.size();
  if (!one_row(operands, logical_order)) {
    Walk walk{row, op, static_cast<int>(count), {}};
    for (size_t k = 0; k < count; ++k) walk.dtypes[k] = operands[k].dtype();
    return run_planned(walk, operands, logical_order);
  }
  const int64_t n = operands[0].numel();
  char* data[LoopPlan::kMaxOperands];
  for (size_t k = 0; k < count; ++k) data[k] = static_cast<char*>(operands[k].data_ptr());
  if (n <= kPiece) return row(op, data, n, 0);
  parallel_for(n, kPiece, [&](int64_t begin, int64_t end) {
    char* at[LoopPlan::kMaxOperands];
    for (size_t k = 0; k < count; ++k)
      at[k] = data[k] + begin * static_cast<int64_t>(size_of(operands[k].dtype()));
    row(op, at, end - begin, begin);
  });
}

namespace {

template <class Op, class... Ops>
constexpr bool is_among(List<Ops...>) {
  return (std::is_same_v<Op, Ops> || ...);
}
/// The f32 and f64 kernels of Op, wherever they are.
template <class Op>
const FloatKernels<Op>& float_kernels() {
  if constexpr (is_among<Op>(formulas::UnaryOps()))
    return std::get<FloatKernels<Op>>(unary_kernels());
  else
    return std::get<FloatKernels<Op>>(many_operand_kernels());
}

template <class Op>
void forward(const Operands& operands, const Op& op) {
  const DType t = compute_dtype(operands[operands.size() - 1].dtype());
  Row row = scalar_kernel<Op>(t);
  if constexpr (!Op::predicate) {
    static const FloatKernels<Op>& kernels = float_kernels<Op>();
    if (t == DType::f32) row = kernels.forward[0];
    if (t == DType::f64) row = kernels.forward[1];
  }
  LOCKSTEP_CHECK(row, DTypeError, Op::name, ": not defined for ", t,
                 "; convert with to(DType::f32)");
  run_rows(row, &op, operands);
}

template <class Op, int I>
void derivative(const Operands& operands, const Op& op) {
  static const FloatKernels<Op>& kernels = float_kernels<Op>();
  run_rows(kernels.derivative[operands[0].dtype() == DType::f64][I], &op, operands);
}

void where(const Operands& operands, const formulas::Where& op) {
  run_rows(where_kernel(compute_dtype(operands[0].dtype())), &op, operands);
}
void dropout(const Tensor& y, const Tensor& x, double p, const Ref<Cell<RandomKey>>& key) {
  const formulas::Dropout op{
      {}, p, p < 1 ? 1 / (1 - p) : 0.0, key->value.seed, key->value.offset};
  run_rows(dropout_kernel(compute_dtype(y.dtype())), &op, Operands(y, x), /*logical_order=*/true);
}

constexpr DTypes dtypes_of(Domain domain) {
  return domain == Domain::floats    ? dtypes::kFloating
         : domain == Domain::numbers ? dtypes::kAll & ~dtypes::only(DType::boolean)
                                     : dtypes::kAll;
}

template <class Op>
void enter() {
  ElementwiseTable<Op>& table = elementwise_table<Op>();
  table.forward.set(DeviceType::cpu, forward<Op>, dtypes_of(Op::domain));
  if constexpr (kDerivatives<Op> > 0)
    table.derivative[0].set(DeviceType::cpu, derivative<Op, 0>, dtypes::kFloating);
  if constexpr (kDerivatives<Op> > 1)
    table.derivative[1].set(DeviceType::cpu, derivative<Op, 1>, dtypes::kFloating);
  if constexpr (kDerivatives<Op> > 2)
    table.derivative[2].set(DeviceType::cpu, derivative<Op, 2>, dtypes::kFloating);
}
template <class... Ops>
bool enter_all(List<Ops...>) {
  (enter<Ops>(), ...);
  return true;
}
const bool entered =
    enter_all(formulas::DifferentiableOps() + formulas::Predicates()) &&
    elementwise_table<formulas::Where>().forward.set(DeviceType::cpu, where, dtypes::kAll) &&
    kernels::dropout.set(DeviceType::cpu, dropout, dtypes::kFloating);

}  // namespace
}  // namespace lockstep::cpu

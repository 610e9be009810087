// How a LoopPlan is made (broadcast, order, merge) and cut into pieces.
#include <lockstep/tensor/cpu/loops.h>

#include <algorithm>

#include <lockstep/tensor/parallel.h>

namespace lockstep::cpu {
namespace {

constexpr int64_t kPiece = 32768;  // elements that one thread takes at a time

/// Swaps two dimensions of a plan.
void swap_dims(LoopPlan& plan, int a, int b) {
  std::swap(plan.sizes[a], plan.sizes[b]);
  for (int k = 0; k < plan.operands; ++k) std::swap(plan.strides[k][a], plan.strides[k][b]);
}

/// Drops dimensions of size 1 and joins each dimension with the next outer one where all operands
/// allow.
void merge_dims(LoopPlan& plan) {
  int last = -1;  // the dimension that grows
  for (int d = 0; d < plan.dims; ++d) {
    if (plan.sizes[d] == 1) continue;
    bool joins = last >= 0;
    for (int k = 0; joins && k < plan.operands; ++k)
      joins = plan.strides[k][d] == plan.strides[k][last] * plan.sizes[last];
    if (joins) {
      plan.sizes[last] *= plan.sizes[d];
      continue;
    }
    ++last;
    plan.sizes[last] = plan.sizes[d];
    for (int k = 0; k < plan.operands; ++k) plan.strides[k][last] = plan.strides[k][d];
  }
  if (last < 0) {  // one element
    last = 0;
    plan.sizes[0] = 1;
    for (int k = 0; k < plan.operands; ++k) plan.strides[k][0] = 0;
  }
  plan.dims = last + 1;
}

}  // namespace

LoopPlan LoopPlan::make(const Operands& operands, bool keep_order) {
  LoopPlan plan;
  const Shape& shape = operands[0].shape();
  plan.operands = static_cast<int>(operands.size());
  plan.dims = shape.dims();
  for (int d = 0; d < plan.dims; ++d) plan.sizes[d] = shape[plan.dims - 1 - d];
  for (int k = 0; k < plan.operands; ++k) {
    const Tensor& t = operands[static_cast<size_t>(k)];
    plan.data[k] = static_cast<char*>(t.data_ptr());
    const int64_t bytes = static_cast<int64_t>(size_of(t.dtype()));
    LOCKSTEP_CHECK(t.dim() <= plan.dims, ShapeError, "loop: ", t.shape(), " does not broadcast to ",
                   shape);
    for (int d = 0; d < plan.dims; ++d) {
      const int own = t.dim() - 1 - d;  // missing dimensions and those of size 1 are repeated
      const bool repeats = own < 0 || t.shape()[own] == 1;
      LOCKSTEP_CHECK(repeats || t.shape()[own] == plan.sizes[d], ShapeError, "loop: ", t.shape(),
                     " does not broadcast to ", shape);
      plan.strides[k][d] = repeats ? 0 : t.strides()[own] * bytes;
    }
  }
  if (!keep_order) {
    // The result's smallest stride innermost; a stable insertion sort.
    for (int i = 1; i < plan.dims; ++i)
      for (int j = i; j > 0; --j) {
        const bool real = plan.sizes[j] > 1 && plan.sizes[j - 1] > 1;
        if (real ? plan.strides[0][j] >= plan.strides[0][j - 1]
                 : plan.sizes[j] > 1 || plan.sizes[j - 1] == 1)
          break;
        swap_dims(plan, j, j - 1);
      }
  }
  merge_dims(plan);
  return plan;
}

int64_t LoopPlan::numel() const {
  int64_t n = 1;
  for (int d = 0; d < dims; ++d) n *= sizes[d];
  return n;
}

void LoopPlan::run_blocks(void* context, Block block) const {
  const int64_t n = numel();
  if (n == 0) return;
  // Pieces: a stretch of one row, or whole rows of one matrix (dimensions 0 and 1).
  const int64_t length = sizes[0], height = dims > 1 ? sizes[1] : 1;
  const int64_t count = std::min(length, kPiece),
                rows = std::clamp<int64_t>(kPiece / length, 1, height);
  const int64_t cuts = (length + count - 1) / count, bands = (height + rows - 1) / rows;
  Step steps[kMaxOperands];
  for (int k = 0; k < operands; ++k) steps[k] = {strides[k][0], dims > 1 ? strides[k][1] : 0};
  auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = i % cuts * count, top = i / cuts % bands * rows,
                    matrix = i / (cuts * bands);
      char* at[kMaxOperands];
      for (int k = 0; k < operands; ++k)
        at[k] = data[k] + from * steps[k].inner + top * steps[k].outer;
      for (int64_t rest = matrix, d = 2; d < dims; rest /= sizes[d], ++d)
        for (int k = 0; k < operands; ++k) at[k] += rest % sizes[d] * strides[k][d];
      block(context, at, steps, std::min(count, length - from), std::min(rows, height - top),
            (matrix * height + top) * length + from);
    }
  };
  const int64_t tasks = n / (length * height) * bands * cuts;
  if (n <= kPiece)
    work(0, tasks);
  else
    parallel_for(tasks, std::max<int64_t>(1, kPiece / (count * rows)), work);
}

void LoopPlan::run(void* context, Row row) const {
  struct Rows {
    void* context;
    Row row;
    int operands;
    int64_t length;
  } rows{context, row, operands, sizes[0]};
  run_blocks(&rows, [](void* r, char* const* data, const Step* strides, int64_t count,
                       int64_t height, int64_t first) {
    const Rows& rows = *static_cast<Rows*>(r);
    char* at[kMaxOperands];
    int64_t inner[kMaxOperands];
    for (int k = 0; k < rows.operands; ++k) at[k] = data[k], inner[k] = strides[k].inner;
    for (int64_t i = 0; i < height; ++i, first += rows.length) {
      rows.row(rows.context, at, inner, count, first);
      for (int k = 0; k < rows.operands; ++k) at[k] += strides[k].outer;
    }
  });
}

}  // namespace lockstep::cpu

#include <lockstep/optim/fused.h>

#include <algorithm>

#include <lockstep/optim/layout.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::optim {

/// One step: add() what is to be updated, which may throw; then run().
struct FusedOptimizer::Pass {
  struct Task {
    Param& param;
    Update::Row row;
    std::array<double, 8> constants;
    Tensor gradient, gappy_result;  // in the order of the parameter's memory
    std::array<Tensor, kMaxState> state;
    std::array<void*, 2 + kMaxState> arrays;
    int64_t begin, end;  // its place in the traversal of all tensors
  };
  std::vector<Task> tasks;
  int64_t elements = 0;

  void add(Param& p, const Tensor& gradient, const Update& u, int states) {
    const Tensor& w = p.tensor;
    const bool dense = is_dense(w);
    const Strides layout = dense ? w.strides() : contiguous_strides(w.shape());
    const DType dtype = w.dtype();
    Task task{p,
              dtype == DType::f32 ? u.f32 : u.f64,
              u.constants,
              in_layout(gradient, layout, dtype),
              dense ? Tensor() : in_layout(w, layout, dtype),
              p.state,
              {},
              elements,
              elements + w.numel()};
    task.arrays[0] = dense ? w.data_ptr() : task.gappy_result.data_ptr();
    task.arrays[1] = task.gradient.data_ptr();
    for (size_t s = 0; s < static_cast<size_t>(states); ++s) {
      Tensor& state = task.state[s];
      state = state.defined() ? in_layout(state, layout, dtype)
                              : empty_strided(w.shape(), layout,
                                              {.dtype = dtype, .device = w.device()})
                                    .zero_();
      task.arrays[2 + s] = state.data_ptr();
    }
    // Tensors begin at multiples of 64, so that a block never cuts a tensor inside a SIMD pack.
    elements = (task.end + 63) / 64 * 64;
    tasks.push_back(std::move(task));
  }

  void run() {
    constexpr int64_t kBlock = 1 << 14;
    parallel_for(elements, kBlock, [this](int64_t begin, int64_t end) {
      auto task = std::upper_bound(tasks.begin(), tasks.end(), begin,
                                   [](int64_t at, const Task& t) { return at < t.begin; }) -
                  1;
      for (; task != tasks.end() && task->begin < end; ++task) {
        const int64_t from = std::max(begin, task->begin), to = std::min(end, task->end);
        if (from < to)
          task->row(task->constants.data(), task->arrays.data(), from - task->begin,
                    to - task->begin);
      }
    });
    for (Task& task : tasks) {
      task.param.state = std::move(task.state);
      ++task.param.steps;
      task.param.tensor.storage().bump_version();
    }
    for (const Task& task : tasks)
      if (task.gappy_result.defined())
        lockstep::detail::copy_kernel(task.param.tensor, task.gappy_result);
  }
};

void FusedOptimizer::step() {
  for (int g = 0; g < groups(); ++g) check_options(g);
  Pass pass;
  pass.tasks.reserve(params_.size());
  for (Param& p : params_) {
    const Tensor gradient = p.tensor.grad();
    if (!gradient.defined()) continue;
    const DType dtype = p.tensor.dtype();
    LOCKSTEP_CHECK(dtype == DType::f32 || dtype == DType::f64, DTypeError,
                   "step: parameters are f32 or f64, parameter ", &p - params_.data(), " of shape ",
                   p.tensor.shape(), " is ", dtype, "; keep the module in f32");
    LOCKSTEP_CHECK(p.tensor.device().is_cpu(), DeviceError, "step: no kernels are loaded for ",
                   p.tensor.device());
    p.tensor.storage().check_writable("step");
    pass.add(p, gradient, update(p.group, p), states(p.group));
  }
  pass.run();
}

}  // namespace lockstep::optim

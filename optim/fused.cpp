#include <lockstep/optim/fused.h>

#include <algorithm>

#include <lockstep/optim/layout.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::optim {

struct FusedOptimizer::Pass {
  struct Task {
    Update::Row row;
    std::array<double, 8> constants;
    std::array<void*, 2 + kMaxState> arrays;
    int64_t begin, end;  // its place in the walk over all tensors
  };
  std::vector<Task> tasks;
  std::vector<Tensor> alive;                       // gradients, copied where their order differed
  std::vector<std::pair<Tensor, Tensor>> results;  // gappy parameter, dense copy to be written back
  int64_t elements = 0;

  void add(Param& p, const Tensor& gradient, const Update& u) {
    const Tensor& w = p.tensor;
    const bool dense = is_dense(w);
    const Strides layout = dense ? w.strides() : contiguous_strides(w.shape());
    const DType dtype = w.dtype();
    Task task{dtype == DType::f32 ? u.f32 : u.f64, u.constants, {}, elements, elements + w.numel()};
    if (dense) {
      task.arrays[0] = w.data_ptr();
    } else {
      results.emplace_back(w, in_layout(w, layout, dtype));
      task.arrays[0] = results.back().second.data_ptr();
    }
    alive.push_back(in_layout(gradient, layout, dtype));
    task.arrays[1] = alive.back().data_ptr();
    for (size_t s = 0; s < static_cast<size_t>(u.states); ++s) {
      Tensor& state = p.state[s];
      if (state.defined())
        state = in_layout(state, layout, dtype);
      else
        state = empty_strided(w.shape(), layout, {.dtype = dtype, .device = w.device()}).zero_();
      task.arrays[2 + s] = state.data_ptr();
    }
    tasks.push_back(task);
    // Tensors begin at multiples of 64, so that a block never cuts a tensor inside a SIMD pack.
    elements = (task.end + 63) / 64 * 64;
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
    for (auto& [w, result] : results) lockstep::detail::copy_kernel(w, result);
    tasks.clear();
    alive.clear();
    results.clear();
    elements = 0;
  }
};

FusedOptimizer::FusedOptimizer(std::vector<std::vector<Tensor>> groups)
    : Optimizer(std::move(groups)), pass_(std::make_unique<Pass>()) {}
FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;

void FusedOptimizer::step() {
  for (const Param& p : params_)
    LOCKSTEP_CHECK(p.tensor.dtype() == DType::f32 || p.tensor.dtype() == DType::f64, DTypeError,
                   "step: parameters are f32 or f64, one of shape ", p.tensor.shape(), " is ",
                   p.tensor.dtype());
  for (Param& p : params_) {
    const Tensor gradient = p.tensor.grad();
    if (!gradient.defined()) continue;
    LOCKSTEP_CHECK(p.tensor.device().is_cpu(), DeviceError, "step: no kernels are loaded for ",
                   p.tensor.device());
    pass_->add(p, gradient, update(p.group, ++p.steps));
  }
  pass_->run();
  for (Param& p : params_)
    if (p.tensor.grad().defined()) p.tensor.storage().bump_version();
}

}  // namespace lockstep::optim

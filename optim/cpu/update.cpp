// The optimizers' kernels on the CPU. Constants are computed when a kernel runs, from the options and the
// counts in memory.
#include <algorithm>
#include <cmath>

#include <lockstep/optim/adam.h>
#include <lockstep/optim/cpu/rows.h>
#include <lockstep/optim/sgd.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::optim::cpu {

void Pass::add(Row row, const std::array<double, 8>& constants, const std::array<void*, 5>& arrays,
               int64_t count) {
  tasks.push_back({row, constants, arrays, elements_, elements_ + count});
  // Tensors begin at multiples of 64, so that a block never cuts a tensor inside a SIMD pack.
  elements_ = (tasks.back().end + 63) / 64 * 64;
}

void Pass::run() const {
  constexpr int64_t kBlock = 1 << 14;
  parallel_for(elements_, kBlock, [this](int64_t begin, int64_t end) {
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
}

namespace {

/// Updates all parameters by the rows and constants that of(update's count) gives, and counts.
template <class F>
void run_updates(const ParameterUpdates& updates, const Rows& rows, const F& constants_of) {
  Pass pass;
  pass.tasks.reserve(updates.list.size());
  for (const ParameterUpdates::Update& u : updates.list) {
    std::array<void*, 5> arrays{u.parameter.data_ptr(), u.gradient.data_ptr()};
    for (size_t s = 0; s < u.state.size(); ++s)
      if (u.state[s].defined()) arrays[2 + s] = u.state[s].data_ptr();
    pass.add(rows.of(u.parameter.dtype()), constants_of(u.count->value), arrays,
             u.parameter.numel());
  }
  pass.run();
  for (const ParameterUpdates::Update& u : updates.list) {
    ++u.count->value.steps;
    u.count->value.fresh = false;
  }
}

void sgd_cpu(const ParameterUpdates& updates, const Ref<Cell<SGDOptions>>& cell) {
  const SGDOptions& o = cell->value;
  const Rows& rows = o.momentum == 0 ? table().sgd
                     : o.nesterov    ? table().sgd_nesterov
                                     : table().sgd_momentum;
  run_updates(updates, rows, [&](const UpdateCount& count) -> std::array<double, 8> {
    // The buffer starts as zeros, so that an undampened first update makes it the gradient itself.
    return {o.lr, o.weight_decay, o.momentum, count.fresh ? 1 : 1 - o.dampening};
  });
}

template <bool decoupled>
void adam_cpu(const ParameterUpdates& updates, const Ref<Cell<AdamBaseOptions<decoupled>>>& cell) {
  const AdamBaseOptions<decoupled>& o = cell->value;
  const Rows& rows = o.amsgrad ? table().adam_amsgrad : table().adam;
  run_updates(updates, rows, [&](const UpdateCount& count) -> std::array<double, 8> {
    const auto t = static_cast<double>(count.steps + 1);
    const double correction1 = 1 - std::pow(o.betas[0], t),
                 correction2 = 1 - std::pow(o.betas[1], t);
    return {o.lr / correction1,
            1 / std::sqrt(correction2),
            o.betas[0],
            o.betas[1],
            o.eps,
            decoupled ? 0 : o.weight_decay,
            decoupled ? 1 - o.lr * o.weight_decay : 1};
  });
}

const bool entered = kernels::sgd.set(DeviceType::cpu, sgd_cpu, dtypes::kFloats) &&
                     kernels::adam.set(DeviceType::cpu, adam_cpu<false>, dtypes::kFloats) &&
                     kernels::adamw.set(DeviceType::cpu, adam_cpu<true>, dtypes::kFloats);

}  // namespace
}  // namespace lockstep::optim::cpu

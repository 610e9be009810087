#include <lockstep/optim/fused.h>

#include <utility>

#include <lockstep/optim/layout.h>
#include <lockstep/tensor/ops/copy.h>

namespace lockstep::optim {
void FusedOptimizer::step() {
  for (int g = 0; g < groups(); ++g) check_options(g);
  struct Batch {  // the parameters of one group on one device
    int group;
    Device device;
    ParameterUpdates updates;
    std::vector<Param*> params;
  };
  std::vector<Batch> batches;
  const auto batch_of = [&](int group, Device device) -> Batch& {
    for (Batch& b : batches)
      if (b.group == group && b.device == device) return b;
    return batches.emplace_back(Batch{group, device, {}, {}});
  };
  for (Param& p : params_) {
    const Tensor gradient = p.tensor.grad();
    if (!gradient.defined()) continue;
    const Tensor& w = p.tensor;
    const DType dtype = w.dtype();
    LOCKSTEP_CHECK(dtype == DType::f32 || dtype == DType::f64, DTypeError,
                   "step: parameters are f32 or f64, parameter ", &p - params_.data(), " of shape ",
                   w.shape(), " is ", dtype, "; keep the module in f32");
    w.storage().check_writable("step");
    const Strides layout = is_dense(w) ? w.strides() : contiguous_strides(w.shape());
    ParameterUpdates::Update u{in_layout(w.detach(), layout, dtype),
                               in_layout(gradient.detach(), layout, dtype), p.state, p.count};
    for (int s = 0; s < states(p.group); ++s) {
      Tensor& state = u.state[static_cast<size_t>(s)];
      state = state.defined() ? in_layout(state, layout, dtype)
                              : empty_strided(w.shape(), layout,
                                              {.dtype = dtype, .device = w.device()})
                                    .zero_();
    }
    Batch& batch = batch_of(p.group, w.device());
    batch.updates.list.push_back(std::move(u));
    batch.params.push_back(&p);
  }
  for (Batch& batch : batches) {
    for (size_t i = 0; i < batch.params.size(); ++i)
      if (states(batch.group) > 0 && !batch.params[i]->state[0].defined())
        batch.params[i]->count->value.fresh = true;
    update(batch.group, batch.updates);
    for (size_t i = 0; i < batch.params.size(); ++i) {
      batch.params[i]->state = std::move(batch.updates.list[i].state);
      batch.params[i]->tensor.storage().bump_version();
    }
  }
  for (const Batch& batch : batches)
    for (size_t i = 0; i < batch.params.size(); ++i) {
      const Tensor &w = batch.params[i]->tensor, &result = batch.updates.list[i].parameter;
      if (result.data_ptr() != w.data_ptr()) lockstep::kernels::copy(w, result);
    }
}

}  // namespace lockstep::optim

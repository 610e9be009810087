// The kernels of the device "late": each keeps its arguments and puts the CPU's kernel into the current
// stream. Cells are read when the call is made, as a GPU's launch does.
#include <cstring>

#include <lockstep/lockstep.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/elementwise_table.h>

#include "late_device.h"

using namespace lockstep;

namespace late {
namespace {

/// t as the CPU's kernels see it: the same memory, where it can be touched.
Tensor on_cpu(const Tensor& t) {
  if (!t.defined() || t.device().is_cpu()) return t;
  int64_t last = -1;
  if (t.numel() > 0) {
    last = 0;
    for (int d = 0; d < t.dim(); ++d) last += (t.shape()[d] - 1) * t.strides()[d];
  }
  Tensor alias = from_blob(mapped(t.data_ptr(), t.device().index), {last + 1}, {.dtype = t.dtype()});
  alias.body().shape = t.shape();
  alias.body().strides = t.strides();
  return alias;
}
std::vector<Tensor> on_cpu(std::vector<Tensor> tensors) {
  for (Tensor& t : tensors) t = on_cpu(t);
  return tensors;
}
optim::ParameterUpdates on_cpu(optim::ParameterUpdates updates) {
  for (auto& u : updates.list) {
    u.parameter = on_cpu(u.parameter);
    u.gradient = on_cpu(u.gradient);
    for (Tensor& s : u.state) s = on_cpu(s);
  }
  return updates;
}
template <class T>
T on_cpu(const T& value) {
  return value;
}

/// What a cell holds at the call.
template <class T>
T snapshot(const T& kept) {
  return kept;
}
template <class T>
Ref<Cell<T>> snapshot(const Ref<Cell<T>>& cell) {
  return make_ref<Cell<T>>(cell->value);
}
optim::ParameterUpdates snapshot(optim::ParameterUpdates updates) {
  for (auto& u : updates.list) {
    const Ref<Cell<optim::UpdateCount>> count = u.count;
    u.count = snapshot(count);
    count->value = {count->value.steps + 1, false};
  }
  return updates;
}

template <class A>
int device_of(const A& a, int known) {
  detail::KernelArgument<A>::each_tensor(a, [&](const Tensor& t) { known = t.device().index; });
  return known;
}

/// get() names a kernel; run puts it into the stream.
template <auto get, class K = std::remove_cvref_t<decltype(get())>>
struct Late;
template <auto get, class... Args>
struct Late<get, Kernel<void(Args...)>> {
  template <class A>
  using Argument = detail::KernelArgument<std::remove_cvref_t<A>>;

  static void run(Args... args) {
    int index = 0;
    ((index = device_of<std::remove_cvref_t<Args>>(args, index)), ...);
    // The memory is what it is now, and stays alive.
    const std::tuple<typename Argument<Args>::Kept...> kept(
        snapshot(detail::keep<std::remove_cvref_t<Args>>(args))...);
    enqueue(index, [kept, there = std::apply(
                              [](const auto&... k) {
                                return std::tuple<typename Argument<Args>::Kept...>(on_cpu(k)...);
                              },
                              kept)] {
      std::apply([](const auto&... t) { get().on(Device())(Argument<Args>::pass(t)...); }, there);
    });
  }
};

template <auto get>
void enter(DeviceType type) {
  get().set(type, Late<get>::run, get().dtypes(DeviceType::cpu));
}

template <class... R>
void enter_reductions(DeviceType type, List<R...>) {
  (enter<[]() -> auto& { return reduction_kernel<R>(); }>(type), ...);
}

template <class... Ops>
void enter_elementwise(DeviceType type, List<Ops...>) {
  (
      [type] {
        enter<[]() -> auto& { return elementwise_table<Ops>().forward; }>(type);
        if constexpr (kDerivatives<Ops> > 0)
          enter<[]() -> auto& { return elementwise_table<Ops>().derivative[0]; }>(type);
        if constexpr (kDerivatives<Ops> > 1)
          enter<[]() -> auto& { return elementwise_table<Ops>().derivative[1]; }>(type);
        if constexpr (kDerivatives<Ops> > 2)
          enter<[]() -> auto& { return elementwise_table<Ops>().derivative[2]; }>(type);
      }(),
      ...);
}

// The source may change after the call, so it is copied at once.
void upload(const Tensor& dst, const OnHost& src) {
  const Tensor staged = src.tensor.clone();
  enqueue(dst.device().index,
          [dst, there = on_cpu(dst), staged] { kernels::copy(there, staged); });
}
void download(const OnHost& dst, const Tensor& src) {
  wait_for(src.device().index);
  kernels::copy(dst.tensor, on_cpu(src));
}

}  // namespace

#define LATE_KERNEL(name) enter<[]() -> auto& { return kernels::name; }>(type)

void enter_kernels(DeviceType type) {
  enter_elementwise(type, formulas::DifferentiableOps() + formulas::Predicates() +
                              List<formulas::Where>());
  enter_reductions(type, reductions::Reductions());
  LATE_KERNEL(adam);
  LATE_KERNEL(adamw);
  LATE_KERNEL(arange);
  LATE_KERNEL(argmax);
  LATE_KERNEL(batch_norm);
  LATE_KERNEL(batch_norm_backward);
  LATE_KERNEL(batch_norm_combine);
  LATE_KERNEL(batch_norm_statistics);
  LATE_KERNEL(batch_norm_sums);
  LATE_KERNEL(batch_norm_update);
  LATE_KERNEL(clip_grad_norm);
  LATE_KERNEL(conv2d);
  LATE_KERNEL(conv2d_backward_data);
  LATE_KERNEL(conv2d_backward_weights);
  LATE_KERNEL(copy);
  LATE_KERNEL(cross_entropy);
  LATE_KERNEL(cross_entropy_backward);
  LATE_KERNEL(dropout);
  LATE_KERNEL(fill);
  LATE_KERNEL(grad_norm);
  LATE_KERNEL(layer_norm);
  LATE_KERNEL(layer_norm_backward);
  LATE_KERNEL(linear);
  LATE_KERNEL(linear_backward);
  LATE_KERNEL(log_softmax);
  LATE_KERNEL(log_softmax_backward);
  LATE_KERNEL(matmul);
  LATE_KERNEL(max_pool2d);
  LATE_KERNEL(max_pool2d_gather);
  LATE_KERNEL(max_pool2d_scatter);
  LATE_KERNEL(put_along);
  LATE_KERNEL(rand);
  LATE_KERNEL(randint);
  LATE_KERNEL(randn);
  LATE_KERNEL(sgd);
  LATE_KERNEL(softmax);
  LATE_KERNEL(softmax_backward);
  LATE_KERNEL(squared_deviations);
  LATE_KERNEL(take_along);
  LATE_KERNEL(trunc_normal);
  kernels::upload.set(type, upload, dtypes::kAll);
  kernels::download.set(type, download, dtypes::kAll);
}

}  // namespace late

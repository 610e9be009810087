// Entry point through which every differentiable op is executed and recorded: apply() for ops that
// make new tensors, apply_list() for those over a list of tensors, apply_in_place() for those that
// write to one. An op is a struct: its fields are its parameters, forward computes, and backward,
// right below it, differentiates.
//
//   struct Softmax {
//     static constexpr const char* name = "softmax";
//     static constexpr unsigned saves = kOutput;  // what backward reads: kInput(i) | kOutput
//     static constexpr Precision precision = Precision::full;  // optional: Precision::given
//     int64_t dim;
//     Tensor forward(const Tensor& x);            // grad mode is off
//     void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const;
//   };
//   Tensor softmax(const Tensor& x, int64_t dim) { return apply(Softmax{dim}, x); }
//
// A forward that takes a Saver& before its inputs may keep further tensors (statistics, indices). An
// op of several inputs may define saves_for(i), what the derivative by input i reads, instead of
// `saves`. A forward with several results returns a std::array, std::tuple or std::vector of
// tensors; backward then takes their gradients as a std::span<const Tensor>, undefined for results
// that received none.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>

#include <lockstep/tensor/node.h>
#include <lockstep/tensor/op_hook.h>
#include <lockstep/tensor/op_node.h>

namespace lockstep {

namespace detail {

/// Makes `edge` the place where t comes from.
inline void attach(const Tensor& t, Edge edge) {
  TensorBody& body = t.body();
  body.node = std::move(edge.node);
  body.output = edge.output;
}
/// Throws if an op must not write to x; `records` says whether the op is recorded.
LOCKSTEP_API void check_in_place(const char* op, const Tensor& x, bool records);
/// Sets the node of x, whose elements an op has just changed. If x is a view, its base gets a node
/// too: the previous base with the view's elements replaced.
LOCKSTEP_API void attach_in_place(const Tensor& x, Ref<Node> node);

/// Makes y, which shares x's storage, a view of x: in-place ops on either reach the other's gradient.
LOCKSTEP_API void become_view(const Tensor& y, const Tensor& x);

/// Which input y, the result of a forward, is or is a view of; null for none. A view that alone holds
/// its storage is an ordinary tensor.
LOCKSTEP_API const Tensor* source_of(const char* op, const Tensor& y,
                                     std::span<const Tensor* const> inputs);

/// What a forward returns, as a list of tensors and back.
template <class R>
struct Results;
template <>
struct Results<Tensor> {
  static constexpr int count = 1;
  static std::array<Tensor, 1> open(Tensor&& y) { return {std::move(y)}; }
  static Tensor close(std::array<Tensor, 1>&& ys) { return std::move(ys[0]); }
};
template <size_t N>
struct Results<std::array<Tensor, N>> {
  static constexpr int count = N;
  static std::array<Tensor, N> open(std::array<Tensor, N>&& ys) { return std::move(ys); }
  static std::array<Tensor, N> close(std::array<Tensor, N>&& ys) { return std::move(ys); }
};
template <>
struct Results<std::vector<Tensor>> {
  static constexpr int count = kMany;
  static std::vector<Tensor> open(std::vector<Tensor>&& ys) { return std::move(ys); }
  static std::vector<Tensor> close(std::vector<Tensor>&& ys) { return std::move(ys); }
};
template <class... T>
requires(std::is_same_v<T, Tensor>&&...) struct Results<std::tuple<T...>> {
  static constexpr int count = sizeof...(T);
  static std::array<Tensor, sizeof...(T)> open(std::tuple<T...>&& ys) {
    return std::apply([](auto&... y) { return std::array{std::move(y)...}; }, ys);
  }
  static std::tuple<T...> close(std::array<Tensor, sizeof...(T)>&& ys) {
    return std::apply([](auto&... y) { return std::tuple<T...>{std::move(y)...}; }, ys);
  }
};

template <int N>
List<Tensor, N> list_of(std::vector<Tensor>&& tensors) {
  if constexpr (N == kMany) {
    return std::move(tensors);
  } else {
    List<Tensor, N> list;
    std::move(tensors.begin(), tensors.end(), list.begin());
    return list;
  }
}

inline bool records(std::span<const Tensor* const> inputs) {
  return is_grad_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const Tensor* x) {
           return x->defined() && x->node();
         });
}

/// The version of an input whose gradient is recorded; those of others may change.
inline uint32_t recorded_version(const Tensor& x) {
  return x.defined() && x.node() ? x.storage().version() : 0;
}
[[noreturn]] LOCKSTEP_API void fail_changed_input(const char* op, const Tensor& x, size_t i);

/// op.forward without grad mode.
template <class Op, class... Inputs>
auto run_forward(Op& op, Saver& saver, const Inputs&... inputs) {
  const NoGradGuard guard;
  if constexpr (requires { op.forward(saver, inputs...); })
    return op.forward(saver, inputs...);
  else
    return op.forward(inputs...);
}

/// Makes the node of the results of a forward, if `record` asks for it. A result that is an input, or
/// one of the results before it, keeps that one's node apart, and what shares an input's storage is a
/// view of it.
template <int In, int Out, class Op>
void finish(Op& op, ListSpan<const Tensor* const, In> inputs, ListSpan<Tensor, Out> ys, bool record,
            Saver& saver) {
  List<const Tensor*, Out> sources = make_list<const Tensor*, Out>(ys.size());
  bool differentiable = false;
  for (size_t i = 0; i < ys.size(); ++i) {
    sources[i] = source_of(Op::name, ys[i], inputs);
    for (size_t j = 0; j < i && !sources[i]; ++j)
      if (ys[j].is_same(ys[i])) sources[i] = &ys[j];
    differentiable |= is_floating(ys[i].dtype()) && saver.is_differentiable(i);
  }
  if (record)
    for (size_t i = ys.size(); i-- > 0;)
      if (sources[i] && sources[i]->is_same(ys[i]) && is_floating(ys[i].dtype()))
        ys[i] = ys[i].detach();
  if (record && differentiable) {
    const Ref<Node> node = make_ref<OpNode<Op, In, Out>>(std::move(op), inputs, ys, saver);
    for (size_t i = 0; i < ys.size(); ++i)
      if (is_floating(ys[i].dtype()) && saver.is_differentiable(i))
        attach(ys[i], {node, static_cast<int>(i)});
  }
  if (!is_grad_enabled()) return;
  for (size_t i = 0; i < ys.size(); ++i)
    if (sources[i] && !sources[i]->is_same(ys[i])) become_view(ys[i], *sources[i]);
}

template <int In, class Op, class Forward>
auto record(Op& op, ListSpan<const Tensor* const, In> inputs, const Forward& forward) {
  const bool record = records(inputs);
  List<uint32_t, In> versions = make_list<uint32_t, In>(inputs.size());
  if (record)
    for (size_t i = 0; i < inputs.size(); ++i) versions[i] = recorded_version(*inputs[i]);
  Saver saver(Op::name, record);
  auto result = forward(op, saver);
  using R = Results<decltype(result)>;
  List<Tensor, R::count> ys = R::open(std::move(result));
  if (record)
    for (size_t i = 0; i < inputs.size(); ++i)
      if (recorded_version(*inputs[i]) != versions[i])
        fail_changed_input(Op::name, *inputs[i], i);
  finish<In, R::count>(op, inputs, ListSpan<Tensor, R::count>(ys), record, saver);
  return ys;
}

/// The one way of every op that makes tensors: `forward` is called with the op and a Saver.
template <int In, class Op, class Forward>
auto apply(Op op, ListSpan<const Tensor* const, In> inputs, const Forward& forward) {
  using R = Results<decltype(forward(op, std::declval<Saver&>()))>;
  if (!op_hooks()) [[likely]]
    return R::close(record<In>(op, inputs, forward));
  std::vector<Tensor> held;
  for (const Tensor* x : inputs) held.push_back(*x);
  return R::close(list_of<R::count>(call_op_hooks(op_info<Op>(), held, R::count, [&] {
    auto ys = record<In>(op, inputs, forward);
    return std::vector<Tensor>(ys.begin(), ys.end());
  })));
}

}  // namespace detail

/// Runs op.forward on the inputs (an undefined Tensor is an absent one) and, when grad mode is on
/// and an input requires grad, makes the op's node the results' node. Returns what forward returns.
template <class Op, class... Inputs>
auto apply(Op op, const Inputs&... inputs) {
  const std::array<const Tensor*, sizeof...(Inputs)> all{&inputs...};
  return detail::apply<sizeof...(Inputs)>(
      std::move(op), detail::ListSpan<const Tensor* const, sizeof...(Inputs)>(all),
      [&](Op& o, Saver& saver) { return detail::run_forward(o, saver, inputs...); });
}

/// apply() for an op over a list of any length (cat, stack): forward takes a std::span<const Tensor>.
template <class Op>
auto apply_list(Op op, std::span<const Tensor> inputs) {
  std::vector<const Tensor*> all;
  for (const Tensor& x : inputs) all.push_back(&x);
  return detail::apply<detail::kMany>(
      std::move(op), std::span<const Tensor* const>(all),
      [&](Op& o, Saver& saver) { return detail::run_forward(o, saver, inputs); });
}

/// Runs op.forward, which writes its result to x, and makes the op x's node. The first of `inputs`
/// is x before the op: x itself, or a copy of it if backward reads that input. The gradients of x's
/// base and of other views of it pass through the op as well. Throws AutogradError where that is
/// impossible: x is a leaf that requires grad, or a view of one.
template <class Op, class... Inputs>
void apply_in_place(Op op, const Tensor& x, const Inputs&... inputs) {
  constexpr int n = sizeof...(Inputs);
  const std::array<const Tensor*, n> all{&inputs...};
  const bool record = is_floating(x.dtype()) && detail::records(all);
  detail::check_in_place(Op::name, x, record);
  const auto run = [&] {
    Saver saver(Op::name, record);
    x.storage().bump_version();
    detail::run_forward(op, saver, inputs...);
    if (record)
      detail::attach_in_place(
          x, make_ref<OpNode<Op, n, 1>>(std::move(op),
                                        detail::ListSpan<const Tensor* const, n>(all),
                                        detail::ListSpan<const Tensor, 1>(&x, 1), saver));
  };
  if (!detail::op_hooks()) [[likely]]
    return run();
  std::array<Tensor, n> held{inputs...};
  held[0] = x;
  detail::call_op_hooks(detail::op_info<Op>(true), held, 1, [&] {
    run();
    return std::vector<Tensor>{x};
  });
}

}  // namespace lockstep

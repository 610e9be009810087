#include <lockstep/tensor/ops/elementwise_table.h>

#include <tuple>

namespace lockstep {

template <class Op>
ElementwiseTable<Op>& elementwise_table() {
  using K = typename ElementwiseTable<Op>::RowsKernel;
  if constexpr (kDerivatives<Op> == 0) {
    static constinit ElementwiseTable<Op> table{K(Op::name), {}};
    return table;
  } else if constexpr (kDerivatives<Op> == 1) {
    static constinit ElementwiseTable<Op> table{K(Op::name), {K(Op::name, "_backward")}};
    return table;
  } else if constexpr (kDerivatives<Op> == 2) {
    static constinit ElementwiseTable<Op> table{
        K(Op::name), {K(Op::name, "_backward_0"), K(Op::name, "_backward_1")}};
    return table;
  } else {
    static constinit ElementwiseTable<Op> table{
        K(Op::name),
        {K(Op::name, "_backward_0"), K(Op::name, "_backward_1"), K(Op::name, "_backward_2")}};
    return table;
  }
}

namespace {
template <class... Ops>
constexpr auto instantiate(List<Ops...>) {
  return std::tuple{&elementwise_table<Ops>...};
}
[[gnu::used]] const auto instances =
    instantiate(formulas::DifferentiableOps() + formulas::Predicates() +
                List<formulas::Where>());
}  // namespace

}  // namespace lockstep

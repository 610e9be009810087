// Element-wise kernels without explicit SIMD: integers and bool, comparisons and where, as plain
// loops over the same formulas.
#include <lockstep/tensor/cpu/elementwise.h>
#include <lockstep/tensor/cpu/scalar_value.h>

namespace lockstep::cpu {
namespace {

template <class T>
T plain(One<T> v) {
  return v.v;
}
bool plain(bool v) { return v; }

template <class Op, class T>
void forward_row(const void* host, char* const* data, int64_t n, int64_t) {
  using R = std::conditional_t<Op::predicate, bool, T>;
  const Op op = *static_cast<const Op*>(host);
  R* y = reinterpret_cast<R*>(data[0]);
  const T* a = reinterpret_cast<const T*>(data[1]);
  if constexpr (Op::inputs == 1) {
    for (int64_t i = 0; i < n; ++i) y[i] = plain(op.f(One<T>(a[i])));
  } else if constexpr (Op::inputs == 2) {
    const T* b = reinterpret_cast<const T*>(data[2]);
    for (int64_t i = 0; i < n; ++i) y[i] = plain(op.f(One<T>(a[i]), One<T>(b[i])));
  } else {
    const T *b = reinterpret_cast<const T*>(data[2]), *c = reinterpret_cast<const T*>(data[3]);
    for (int64_t i = 0; i < n; ++i)
      y[i] = plain(op.f(One<T>(a[i]), One<T>(b[i]), One<T>(c[i])));
  }
}

template <class T>
void where_row(const void*, char* const* data, int64_t n, int64_t) {
  T* y = reinterpret_cast<T*>(data[0]);
  const uint8_t* condition = reinterpret_cast<const uint8_t*>(data[1]);
  const T* a = reinterpret_cast<const T*>(data[2]);
  const T* b = reinterpret_cast<const T*>(data[3]);
  for (int64_t i = 0; i < n; ++i) {
    const T yes = a[i], no = b[i];  // both read, so that the loop has no branch
    y[i] = condition[i] ? yes : no;
  }
}

template <class Op, class T>
constexpr Row row_of() {
  constexpr bool is_float = std::is_floating_point_v<T>;
  if constexpr (Op::predicate)
    return forward_row<Op, T>;
  else if constexpr (is_float || Op::domain == Domain::floats)
    return nullptr;
  else if constexpr (std::is_same_v<T, bool> && Op::domain == Domain::numbers)
    return nullptr;
  else
    return forward_row<Op, T>;
}

}  // namespace

template <class Op>
Row scalar_kernel(DType t) {
  if (!(dtypes::kComputed & dtypes::only(t))) return nullptr;
  return dispatch(Op::name, t, []<class T>(TypeTag<T>) { return row_of<Op, T>(); });
}

Row where_kernel(DType t) {
  return dispatch("where", t, []<class T>(TypeTag<T>) -> Row { return where_row<T>; });
}

namespace {
template <class... Ops>
constexpr auto instantiate(List<Ops...>) {
  return std::tuple{&scalar_kernel<Ops>...};
}
[[gnu::used]] const auto instances =
    instantiate(formulas::DifferentiableOps() + formulas::Predicates());
}  // namespace

}  // namespace lockstep::cpu

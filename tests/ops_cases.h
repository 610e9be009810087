// The cases of ops_test.cpp: every op of the list with its parameters, and tensors of every layout
// that are read and written without the library's help.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "late_device/moved.h"
#include "ops_reference.h"

namespace cases {

using namespace lockstep;

constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64,
                             DType::i32, DType::i16, DType::i8,  DType::u8,   DType::boolean};

/// An op with its parameters, as the driver sees it.
struct Case {
  std::string label;
  int inputs;
  Domain domain;
  bool predicate;
  bool has_number = false, whole_number = true;  // a number takes part in promotion
  bool keeps_dtype = false;                      // an in-place op has no other choice
  bool reads_declared = true;                    // no derivative reads more than Op::probe() found
  double low, high, slack;
  std::vector<double> kinks;
  std::function<Tensor(std::span<const Tensor>)> call;
  std::function<double(const double*)> f;
  std::function<void(std::span<Tensor>)> in_place;  // may be empty
};

/// Whether the derivatives of op, with its parameters, read no more than what is saved for any.
template <class Op, int I = 0>
bool reads_declared(const Op& op) {
  if constexpr (Op::predicate || I == Op::inputs) {
    return true;
  } else {
    const formulas::Probe found = formulas::probe<I>(op);
    return (found.from & ~formulas::reads<Op, I>) == 0 &&
           (found.untouched || !formulas::passes_on<Op, I>)&&reads_declared<Op, I + 1>(op);
  }
}

template <class Op>
Case make_case(Op op) {
  using R = reference::Reference<Op>;
  Case c{.label = Op::name,
         .inputs = Op::inputs,
         .domain = Op::domain,
         .predicate = Op::predicate,
         .reads_declared = reads_declared(op),
         .low = R::low,
         .high = R::high,
         .slack = R::slack,
         .kinks = R::kinks(),
         .call = {},
         .f = {},
         .in_place = {}};
  auto note = [&](Number n, bool promotes) {
    c.label += str_cat(" ", n.value, n.is_whole ? "i" : "");
    c.has_number |= promotes;
    c.whole_number &= n.is_whole;
  };
  if constexpr (requires { op.number; }) note(op.number, true);
  if constexpr (requires { op.exponent; }) note(op.exponent, true);
  if constexpr (requires { op.slope; }) note(op.slope, false);
  if constexpr (requires { op.low; }) note(op.low, true), note(op.high, true);
  if constexpr (requires { op.alpha; }) note(op.alpha, false), c.keeps_dtype = true;
  if constexpr (requires { op.value; }) note(op.value, false);
  if constexpr (Op::inputs == 1) {
    c.call = [op](std::span<const Tensor> x) { return R::call(op, x[0]); };
    c.f = [op](const double* x) { return R::f(op, x[0]); };
    if constexpr (requires(Tensor & x) { R::in_place(op, x); })
      c.in_place = [op](std::span<Tensor> x) { R::in_place(op, x[0]); };
  } else if constexpr (Op::inputs == 3) {
    c.call = [op](std::span<const Tensor> x) { return R::call(op, x[0], x[1], x[2]); };
    c.f = [op](const double* x) { return R::f(op, x[0], x[1], x[2]); };
  } else {
    c.call = [op](std::span<const Tensor> x) { return R::call(op, x[0], x[1]); };
    c.f = [op](const double* x) { return R::f(op, x[0], x[1]); };
    if constexpr (requires(Tensor & x) { R::in_place(op, x, x); })
      c.in_place = [op](std::span<Tensor> x) { R::in_place(op, x[0], x[1]); };
  }
  return c;
}
template <class Op>
void append_cases(std::vector<Case>& cases) {
  if constexpr (requires { reference::Reference<Op>::cases(); })
    for (const Op& op : reference::Reference<Op>::cases()) cases.push_back(make_case(op));
  else
    cases.push_back(make_case(Op{}));
}
template <class... Ops>
std::vector<Case> cases_of(List<Ops...>) {
  std::vector<Case> cases;
  (append_cases<Ops>(cases), ...);
  return cases;
}
/// LOCKSTEP_TEST_DEVICE=late runs them on the second device of the tests, LOCKSTEP_OPS_ONLY=name restricts every test to one op.
inline std::vector<Case> all_cases() {
  std::vector<Case> cases = cases_of(formulas::DifferentiableOps() + formulas::Predicates());
  if (const char* only = std::getenv("LOCKSTEP_OPS_ONLY"))
    std::erase_if(cases,
                  [&](const Case& c) { return c.label.substr(0, c.label.find(' ')) != only; });
  if (late::is_asked_for())
    for (Case& c : cases) {
      c.call = [call = c.call](std::span<const Tensor> x) {
        std::vector<Tensor> there;
        for (const Tensor& t : x) there.push_back(late::moved(t));
        return call(there).to(Device());
      };
      if (c.in_place)
        c.in_place = [change = c.in_place](std::span<Tensor> x) {
          std::vector<Tensor> there;
          for (const Tensor& t : x) there.push_back(late::moved(t));
          change(there);
          x[0].copy_(there[0].to(Device()));
        };
    }
  return cases;
}

// ---- tensors of every layout, read and written without the library ----

/// Calls f(logical index, address of the element).
inline void for_each_element(const Tensor& t, const std::function<void(int64_t, char*)>& f) {
  for (int64_t i = 0, n = t.numel(); i < n; ++i) {
    int64_t rest = i, offset = 0;
    for (int d = t.dim() - 1; d >= 0; rest /= t.shape()[d], --d)
      offset += rest % t.shape()[d] * t.strides()[d];
    f(i, static_cast<char*>(t.data_ptr()) + offset * static_cast<int64_t>(size_of(t.dtype())));
  }
}
inline std::vector<double> read(const Tensor& t) {
  std::vector<double> v(static_cast<size_t>(t.numel()));
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_element(t, [&](int64_t i, char* p) {
      v[static_cast<size_t>(i)] = static_cast<double>(*reinterpret_cast<T*>(p));
    });
  });
  return v;
}
inline void write(const Tensor& t, const std::function<double(int64_t)>& value) {
  dispatch_any(t.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_element(
        t, [&](int64_t i, char* p) { *reinterpret_cast<T*>(p) = static_cast<T>(value(i)); });
  });
}

struct Random {
  uint64_t state = 12345;
  double operator()(double low, double high) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * static_cast<double>(state >> 11) * 0x1p-53;
  }
};
/// Random values that suit c: of integers small ones, of floats away from the kinks.
inline std::function<double(int64_t)> values_for(const Case& c, DType t, Random& random) {
  return [&c, t, &random](int64_t) {
    if (t == DType::boolean) return random(0, 1) < 0.5 ? 0.0 : 1.0;
    if (!is_floating(t)) return std::floor(random(t == DType::u8 ? 1 : -9, 10));
    for (;;) {
      const double v = random(c.low, c.high);
      bool clear = true;
      for (double k : c.kinks) clear &= std::fabs(v - k) > 0.05;
      if (clear) return v;
    }
  };
}

struct Layout {
  const char* name;
  Tensor (*make)(DType);
};
constexpr Layout kLayouts[] = {
    {"contiguous",
     [](DType t) {
       return empty({3, 5, 7}, {.dtype = t});
     }},
    {"transposed",
     [](DType t) {
       return empty({37, 41}, {.dtype = t}).t();
     }},
    {"sliced",
     [](DType t) {
       return empty({9, 23}, {.dtype = t}).slice(0, {1, 8, 2}).slice(1, {3, 22, 3});
     }},
    {"broadcast",
     [](DType t) {
       return empty({6, 1}, {.dtype = t}).expand({4, 6, 5});
     }},
    {"channels-last",
     [](DType t) {
       return empty({2, 5, 4, 3}, {.dtype = t}).permute({0, 3, 1, 2});
     }},
    {"empty",
     [](DType t) {
       return empty({2, 0, 3}, {.dtype = t});
     }},
    {"one element", [](DType t) { return empty({1}, {.dtype = t}); }},
    {"0-d", [](DType t) { return empty({}, {.dtype = t}); }},
    {"several pieces", [](DType t) { return empty({40003}, {.dtype = t}); }},
    {"short rows",
     [](DType t) {
       return empty({67, 8}, {.dtype = t}).slice(1, {0, 5});
     }},
};
/// The second operand of a layout: one of the same kind, or one that broadcasts.
inline std::vector<Tensor> partners(const Layout& layout, DType t) {
  std::vector<Tensor> b{layout.make(t), empty({}, {.dtype = t})};
  if (const Tensor first = b[0]; first.dim() > 1) {
    b.push_back(empty({first.shape().back()}, {.dtype = t}));
    b.push_back(empty(first.shape(), {.dtype = t}));
    Shape column = first.shape();
    column[column.dims() - 1] = 1;
    b.push_back(empty(column, {.dtype = t}));
  }
  return b;
}

/// The dtype that c's result should have, or none when c refuses dtype t.
inline std::optional<DType> expected_dtype(const Case& c, DType t) {
  DType computes = t;
  if (!is_floating(t)) {
    if (c.domain == Domain::floats || !c.whole_number)
      computes = DType::f32;
    else if (t == DType::boolean && c.has_number)
      computes = DType::i64;
  }
  if (c.keeps_dtype && computes != t) return {};
  if (c.domain == Domain::numbers && computes == DType::boolean) return {};
  return c.predicate ? DType::boolean : computes;
}

}  // namespace cases

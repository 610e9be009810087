// Random programs over tensors: a list of instructions on numbered values, the first of which are inputs.
// The same program runs on the library (any dtype, layout, thread count), on plain arrays of double, and
// in PyTorch (programs_torch.py). An instruction is legal on every one of them; backward may refuse a
// program whose in-place ops overwrite what it saved.
#pragma once

#include <random>
#include <string>
#include <vector>

#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/join.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/softmax.h>
#include <lockstep/tensor/tensor.h>

#include "plain_values.h"

namespace programs {

using lockstep::Tensor;
using plain::Shape;
using plain::Value;

struct Instruction {
  std::string op;  // one that ends in _ changes value a in place; the others append a value
  int a = -1, b = -1;
  std::vector<int64_t> numbers;
};
struct Program {
  std::vector<Value> inputs;
  std::vector<Instruction> instructions;
  bool smooth = true;  // has no kinks, so that second derivatives exist everywhere
};

// ---- the ops ----

struct Unary {
  const char* name;
  bool smooth;
  Tensor (*ours)(Tensor);
  double (*plain)(double);
  Tensor& (*in_place)(Tensor&);  // or null
};
struct Binary {
  const char* name;
  bool smooth;
  Tensor (*ours)(const Tensor&, const Tensor&);
  double (*plain)(double, double);
  void (*in_place)(Tensor&, const Tensor&);  // or null
};
inline double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
inline double logistic(double x) { return 1 / (1 + std::exp(-x)); }

// clang-format off
inline const std::vector<Unary>& unary_ops() {
  using namespace lockstep;
  static const std::vector<Unary> ops{
      {"neg", true, neg, [](double x) { return -x; }, neg_},
      {"square", true, square, [](double x) { return x * x; }, nullptr},
      {"tanh", true, tanh, [](double x) { return std::tanh(x); }, tanh_},
      {"sigmoid", true, sigmoid, logistic, sigmoid_},
      {"exp", true, exp, [](double x) { return std::exp(x); }, exp_},
      {"erf", true, erf, [](double x) { return std::erf(x); }, nullptr},
      {"gelu", true, gelu, [](double x) { return x * normal_cdf(x); }, nullptr},
      {"silu", true, silu, [](double x) { return x * logistic(x); }, nullptr},
      {"root", true, [](Tensor x) { return sqrt(square(x) + 1.0); }, [](double x) { return std::sqrt(x * x + 1); }, nullptr},
      {"log", true, [](Tensor x) { return log(square(x) + 1.0); }, [](double x) { return std::log(x * x + 1); }, nullptr},
      {"abs", false, abs, [](double x) { return std::abs(x); }, abs_},
      {"relu", false, relu, [](double x) { return x > 0 ? x : 0; }, relu_},
      {"leaky_relu", false, [](Tensor x) { return leaky_relu(x, 0.1); }, [](double x) { return x > 0 ? x : 0.1 * x; },
       [](Tensor& x) -> Tensor& { return leaky_relu_(x, 0.1); }},
      {"clamp", false, [](Tensor x) { return clamp(x, -1.0, 1.0); }, [](double x) { return std::clamp(x, -1.0, 1.0); },
       [](Tensor& x) -> Tensor& { return clamp_(x, -1.0, 1.0); }},
      {"half", true, [](Tensor x) { return x * 0.5; }, [](double x) { return x * 0.5; },
       [](Tensor& x) -> Tensor& { return x.mul_(0.5); }},
      {"plus", true, [](Tensor x) { return x + 0.25; }, [](double x) { return x + 0.25; },
       [](Tensor& x) -> Tensor& { return x.add_(0.25); }},
      {"fill", true, [](Tensor x) { return x * 0.0 + 1.5; }, [](double) { return 1.5; },
       [](Tensor& x) -> Tensor& { return x.fill_(1.5); }},
  };
  return ops;
}
inline const std::vector<Binary>& binary_ops() {
  using namespace lockstep;
  static const std::vector<Binary> ops{
      {"add", true, add, [](double a, double b) { return a + b; }, [](Tensor& a, const Tensor& b) { a.add_(b); }},
      {"sub", true, sub, [](double a, double b) { return a - b; }, [](Tensor& a, const Tensor& b) { a.sub_(b); }},
      {"mul", true, mul, [](double a, double b) { return a * b; }, [](Tensor& a, const Tensor& b) { a.mul_(b); }},
      {"divide", true, [](const Tensor& a, const Tensor& b) { return a / (square(b) + 1.0); },
       [](double a, double b) { return a / (b * b + 1); }, [](Tensor& a, const Tensor& b) { div_(a, square(b) + 1.0); }},
      {"maximum", false, maximum, [](double a, double b) { return std::max(a, b); }, nullptr},
      {"minimum", false, minimum, [](double a, double b) { return std::min(a, b); }, nullptr},
      // Without a jump where a and b differ by rounding alone.
      {"where", false, [](const Tensor& a, const Tensor& b) { return where(gt(a, b), a, a * 0.5 + b * 0.5); },
       [](double a, double b) { return a > b ? a : 0.5 * (a + b); }, nullptr},
      {"copy", true, [](const Tensor& a, const Tensor& b) { return a * 0.0 + b; }, [](double, double b) { return b; },
       [](Tensor& a, const Tensor& b) { a.copy_(b); }},
  };
  return ops;
}
// clang-format on

template <class Rows>
auto* find(const Rows& rows, const std::string& name) {
  for (auto& row : rows)
    if (name == row.name) return &row;
  return static_cast<decltype(&rows[0])>(nullptr);
}

// ---- one instruction ----

inline lockstep::Shape dims_of(const std::vector<int64_t>& numbers) {
  return lockstep::Shape(std::span<const int64_t>(numbers));
}

/// Runs one instruction on the library's tensors.
inline void run(const Instruction& in, std::vector<Tensor>& values) {
  using namespace lockstep;
  const std::vector<int64_t>& n = in.numbers;
  const bool in_place = in.op.back() == '_';
  const std::string name = in_place ? in.op.substr(0, in.op.size() - 1) : in.op;
  Tensor a = in.a < 0 ? Tensor() : values[static_cast<size_t>(in.a)];
  const Tensor b = in.b < 0 ? Tensor() : values[static_cast<size_t>(in.b)];
  if (in_place) {
    if (auto* row = find(unary_ops(), name)) return void(row->in_place(a));
    return find(binary_ops(), name)->in_place(a, b);
  }
  const auto result = [&]() -> Tensor {
    if (auto* row = find(unary_ops(), name)) return row->ours(a);
    if (auto* row = find(binary_ops(), name)) return row->ours(a, b);
    if (name == "zeros") return zeros(dims_of(n), {.dtype = values[0].dtype()});
    if (name == "clone") return a.clone();
    if (name == "sum") return sum(a, {n[0]}, n[1] != 0);
    if (name == "mean") return mean(a, {n[0]}, n[1] != 0);
    if (name == "var") return var(a, {n[0]}, 0, n[1] != 0);
    if (name == "max") return max(a, n[0], n[1] != 0).values;
    if (name == "softmax") return softmax(a, n[0]);
    if (name == "log_softmax") return log_softmax(a, n[0]);
    if (name == "matmul") return matmul(a, b);
    if (name == "cat") return cat({a, b}, n[0]);
    if (name == "stack") return stack({a, a * 2.0}, n[0]);
    if (name == "reshape") return a.reshape(dims_of(n)).clone();
    if (name == "view") return a.view(dims_of(n));
    if (name == "transpose") return a.transpose(n[0], n[1]);
    if (name == "slice") return a.slice(n[0], {.start = n[1], .stop = n[2], .step = n[3]});
    if (name == "select") return a.select(n[0], n[1]);
    if (name == "unsqueeze") return a.unsqueeze(n[0]);
    if (name == "squeeze") return a.squeeze(n[0]);
    if (name == "expand") return a.expand(dims_of(n));
    throw Error("no op " + in.op);
  };
  values.push_back(result());
}

/// The same on plain arrays.
inline void run(const Instruction& in, std::vector<Value>& values) {
  const std::vector<int64_t>& n = in.numbers;
  const bool in_place = in.op.back() == '_';
  const std::string name = in_place ? in.op.substr(0, in.op.size() - 1) : in.op;
  const Value a = in.a < 0 ? Value{} : values[static_cast<size_t>(in.a)];
  const Value b = in.b < 0 ? Value{} : values[static_cast<size_t>(in.b)];
  using Row = std::vector<double>;
  const auto sum_of = [](const Row& r) { return std::accumulate(r.begin(), r.end(), 0.0); };
  const auto without = [&](Value v) {  // a reduced dimension of size 1 goes unless kept
    if (n[1] == 0) v.shape.erase(v.shape.begin() + n[0]);
    return v;
  };
  const auto log_sum_exp = [](const Row& r) {
    const double top = *std::max_element(r.begin(), r.end());
    double sum = 0;
    for (double x : r) sum += std::exp(x - top);
    return top + std::log(sum);
  };
  const auto result = [&]() -> Value {
    if (auto* row = find(unary_ops(), name)) return map(a, row->plain);
    if (auto* row = find(binary_ops(), name)) return zip(a, b, row->plain);
    const int d = n.empty() ? 0 : static_cast<int>(n[0]);
    if (name == "zeros") {
      Value v = plain::fresh(n, Row(static_cast<size_t>(plain::numel(n))));
      v.dense = true;
      return v;
    }
    if (name == "clone" || name == "reshape") {
      Value v = plain::fresh(name == "clone" ? a.shape : n, plain::elements(a));
      v.dense = true;
      return v;
    }
    if (name == "sum") return without(along(a, d, [&](const Row& r) { return Row{sum_of(r)}; }));
    if (name == "mean")
      return without(along(
          a, d, [&](const Row& r) { return Row{sum_of(r) / static_cast<double>(r.size())}; }));
    if (name == "var")
      return without(along(a, d, [&](const Row& r) {
        const double mean = sum_of(r) / static_cast<double>(r.size());
        double squares = 0;
        for (double x : r) squares += (x - mean) * (x - mean);
        return Row{squares / static_cast<double>(r.size())};
      }));
    if (name == "max")
      return without(
          along(a, d, [](const Row& r) { return Row{*std::max_element(r.begin(), r.end())}; }));
    if (name == "softmax" || name == "log_softmax")
      return along(a, d, [&](Row r) {
        const double total = log_sum_exp(r);
        for (double& x : r) x = name == "softmax" ? std::exp(x - total) : x - total;
        return r;
      });
    if (name == "matmul") return plain::matmul(a, b);
    if (name == "cat" || name == "stack") {
      Shape shape = a.shape;
      if (name == "stack")
        shape.insert(shape.begin() + d, 2);
      else
        shape[static_cast<size_t>(d)] += b.shape[static_cast<size_t>(d)];
      Row y;
      for (int64_t i = 0; i < plain::numel(shape); ++i) {
        Shape c = plain::coordinates(shape, i);
        const auto at = static_cast<size_t>(d);
        if (name == "stack") {
          const double factor = c[at] ? 2 : 1;
          c.erase(c.begin() + d);
          y.push_back(factor * a[static_cast<size_t>(plain::position(a.shape, c))]);
        } else if (c[at] < a.shape[at]) {
          y.push_back(a[static_cast<size_t>(plain::position(a.shape, c))]);
        } else {
          c[at] -= a.shape[at];
          y.push_back(b[static_cast<size_t>(plain::position(b.shape, c))]);
        }
      }
      return plain::fresh(shape, std::move(y));
    }
    Shape shape = a.shape;
    if (name == "view" || name == "unsqueeze" || name == "squeeze") {
      if (name == "view")
        shape = n;
      else if (name == "unsqueeze")
        shape.insert(shape.begin() + d, 1);
      else if (shape[static_cast<size_t>(d)] == 1)
        shape.erase(shape.begin() + d);
      Value v = a;
      v.shape = shape;
      return v;
    }
    if (name == "transpose") {
      const auto p = static_cast<size_t>(n[0]), q = static_cast<size_t>(n[1]);
      std::swap(shape[p], shape[q]);
      return plain::view(a, shape, [&](Shape c) {
        std::swap(c[p], c[q]);
        return c;
      });
    }
    if (name == "slice") {
      const auto at = static_cast<size_t>(d);
      shape[at] = (n[2] - n[1] + n[3] - 1) / n[3];
      return plain::view(a, shape, [&](Shape c) {
        c[at] = n[1] + c[at] * n[3];
        return c;
      });
    }
    if (name == "select") {
      shape.erase(shape.begin() + d);
      return plain::view(a, shape, [&](Shape c) {
        c.insert(c.begin() + d, n[1]);
        return c;
      });
    }
    return plain::expand(a, n);
  };
  if (in_place)
    plain::write(a, result());
  else
    values.push_back(result());
}

// ---- generation ----

/// Makes the program of a seed. `large` gives sizes at which work is cut into blocks for threads.
class Maker {
 public:
  Maker(uint64_t seed, bool large) : random_(seed), large_(large) {}

  Program make() {
    for (int i = 0; i < 3; ++i) {
      Shape shape;
      for (int64_t d = below(3) + (i == 0); d > 0; --d) shape.push_back(size());
      std::vector<double> v;
      for (int64_t k = 0; k < plain::numel(shape); ++k)
        v.push_back(static_cast<double>(below(4001) - 2000) / 1000 + 0.000337);  // at no kink
      program_.inputs.push_back(plain::fresh(shape, std::move(v)));
      values_.push_back(program_.inputs.back());
      // The reference writes to values, and inputs must stay.
      values_.back().memory = std::make_shared<std::vector<double>>(*values_.back().memory);
    }
    const auto length = static_cast<size_t>(6 + below(10));
    for (int tries = 0; program_.instructions.size() < length && tries < 400; ++tries) attempt();
    return std::move(program_);
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  int64_t size() {
    return large_ ? std::array<int64_t, 4>{1, 2, 40, 67}[static_cast<size_t>(below(4))]
                  : 1 + below(4);
  }
  template <class T>
  const T& pick(const std::vector<T>& all) {
    return all[static_cast<size_t>(below(static_cast<int64_t>(all.size())))];
  }
  void emit(Instruction in) {
    run(in, values_);
    program_.instructions.push_back(std::move(in));
  }
  /// Inputs and their views are leaves' memory; expanded views repeat elements.
  bool may_change(const Value& v) {
    for (size_t i = 0; i < program_.inputs.size(); ++i)
      if (v.memory == values_[i].memory) return false;
    std::vector<size_t> sorted = v.index;
    std::sort(sorted.begin(), sorted.end());
    return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  }

  void attempt() {
    const int64_t limit = large_ ? 400000 : 64;
    const int last = static_cast<int>(values_.size()) - 1;
    // Later values are taken more often, so that programs get deep.
    const int a = static_cast<int>(std::max(below(last + 1), below(last + 1)));
    const int b = static_cast<int>(below(last + 1));
    const Value &x = values_[static_cast<size_t>(a)], &y = values_[static_cast<size_t>(b)];
    const int dims = x.dim();
    const int64_t d = dims ? below(dims) : 0;
    Shape wide;
    switch (below(12)) {
      case 0: {
        const Unary& op = pick(unary_ops());
        program_.smooth &= op.smooth;
        return emit({op.name, a, -1, {}});
      }
      case 1:
      case 2: {
        if (!plain::broadcasts(x.shape, y.shape, &wide) || plain::numel(wide) > limit) return;
        const Binary& op = pick(binary_ops());
        program_.smooth &= op.smooth;
        return emit({op.name, a, b, {}});
      }
      case 3:
      case 4: {
        const Unary& op = pick(unary_ops());
        if (!op.in_place || !may_change(x)) return;
        program_.smooth &= op.smooth;
        return emit({op.name + std::string("_"), a, -1, {}});
      }
      case 5:
      case 6: {
        const Binary& op = pick(binary_ops());
        if (!op.in_place || !may_change(x) || !plain::broadcasts(x.shape, y.shape, &wide) ||
            wide != x.shape)
          return;
        return emit({op.name + std::string("_"), a, b, {}});
      }
      case 7: {
        if (!dims) return;
        static const std::vector<std::string> names{"sum", "mean",    "var",
                                                    "max", "softmax", "log_softmax"};
        const std::string& name = pick(names);
        program_.smooth &= name != "max";
        return emit({name, a, -1, {d, below(2)}});
      }
      case 8: {
        if (dims < 2 || y.dim() < 2 ||
            x.shape[static_cast<size_t>(dims) - 1] != y.shape[static_cast<size_t>(y.dim()) - 2])
          return;
        const Shape p(x.shape.begin(), x.shape.end() - 2), q(y.shape.begin(), y.shape.end() - 2);
        if (!plain::broadcasts(p, q, &wide)) return;
        return emit({"matmul", a, b, {}});
      }
      case 9: {
        if (below(2)) return emit({below(3) ? "clone" : "zeros", a, -1, x.shape});
        if (dims < 3 && 2 * x.size() <= limit && below(2)) return emit({"stack", a, -1, {d}});
        if (!dims || x.size() + y.size() > limit || y.dim() != dims) return;
        for (int k = 0; k < dims; ++k)
          if (k != d && x.shape[static_cast<size_t>(k)] != y.shape[static_cast<size_t>(k)]) return;
        return emit({"cat", a, b, {d}});
      }
      default:
        return attempt_view(a, x, d);
    }
  }

  void attempt_view(int a, const Value& x, int64_t d) {
    const int dims = x.dim();
    const int64_t n = dims ? x.shape[static_cast<size_t>(d)] : 1;
    Shape shape = x.shape;
    switch (below(6)) {
      case 0:
        if (dims < 2) return;
        return emit({"transpose", a, -1, {d, below(dims)}});
      case 1: {
        if (!dims) return;
        const int64_t start = below(n), stop = start + 1 + below(n - start);
        return emit({"slice", a, -1, {d, start, stop, 1 + below(2)}});
      }
      case 2:
        if (!dims) return;
        return emit({"select", a, -1, {d, below(n)}});
      case 3:
        if (dims < 3) return emit({"unsqueeze", a, -1, {below(dims + 1)}});
        return emit({"squeeze", a, -1, {d}});
      case 4: {
        if (dims < 3) shape.insert(shape.begin(), size());
        for (size_t k = 0; k < shape.size(); ++k)
          if (shape[k] == 1) shape[k] = size();
        if (plain::numel(shape) > (large_ ? 400000 : 64)) return;
        return emit({"expand", a, -1, shape});
      }
      default: {
        if (dims == 0 || dims > 2 || n % 2 != 0) return;
        shape[static_cast<size_t>(d)] = n / 2;
        shape.insert(shape.begin() + d, 2);
        return emit({x.dense ? "view" : "reshape", a, -1, shape});
      }
    }
  }

  std::mt19937_64 random_;
  bool large_;
  Program program_;
  std::vector<Value> values_;
};

}  // namespace programs

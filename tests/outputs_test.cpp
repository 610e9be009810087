// Ops with several results, and ops over lists: one node each, with the gradient of every result
// apart.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/ops/take_along.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using autograd::grad;
using autograd::gradcheck;
using autograd::gradgradcheck;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Tensors = std::vector<Tensor>;
using Inputs = const Tensors&;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

/// (x^2, exp(x)); backward reads the input and the second output.
struct SquareAndExp {
  static constexpr const char* name = "square_and_exp";
  static constexpr unsigned saves = kInput(0) | kOutput << 1;
  std::vector<bool>* arrived = nullptr;  // what backward was given
  std::array<Tensor, 2> forward(const Tensor& x) const { return {x * x, exp(x)}; }
  void backward(const Saved& saved, std::span<const Tensor> dys, InputGradients& dx) const {
    CHECK(dys.size() == 2);
    if (arrived) *arrived = {dys[0].defined(), dys[1].defined()};
    Tensor g;
    if (dys[0].defined()) g = dys[0] * saved.input(0) * 2.0;
    if (dys[1].defined()) {
      const Tensor h = dys[1] * saved.output(1);
      g = g.defined() ? g + h : h;
    }
    dx.set(0, g);
  }
};
std::array<Tensor, 2> square_and_exp(const Tensor& x) { return apply(SquareAndExp{}, x); }

/// (largest element, its index), as a tuple; the index has no gradient.
struct Largest {
  static constexpr const char* name = "largest";
  static constexpr unsigned saves = 0;
  Shape from = {};
  std::tuple<Tensor, Tensor> forward(Saver& saver, const Tensor& x) {
    from = x.shape();
    const Tensor at = argmax(x, 0, true);
    saver.keep(0, at);
    return {take_along(x, at, 0), at};
  }
  void backward(const Saved& saved, std::span<const Tensor> dys, InputGradients& dx) const {
    CHECK_FALSE(dys[1].defined());
    dx.set(0, put_along(dys[0], saved.kept(0), 0, from));
  }
};

/// The parts of x in its first dimension, views of it.
struct Parts {
  static constexpr const char* name = "parts";
  static constexpr unsigned saves = 0;
  Shape from = {};
  Tensors forward(const Tensor& x) {
    from = x.shape();
    Tensors parts;
    for (int64_t i = 0; i < from[0]; ++i) parts.push_back(x.narrow(0, i, 1));
    return parts;
  }
  void backward(const Saved&, std::span<const Tensor> dys, InputGradients& dx) const {
    Tensors rows;
    Shape one = from;
    one[0] = 1;
    for (const Tensor& dy : dys)
      rows.push_back(dy.defined() ? dy : zeros(one, {.dtype = DType::f64}));
    dx.set(0, cat(rows));
  }
};

/// Each tensor times the sum of all: a list in, a list out, and all inputs saved.
struct TimesSum {
  static constexpr const char* name = "times_sum";
  static constexpr unsigned saves = kInputs;
  int count = 0;
  static Tensor sum(const Saved& saved, int count) {
    Tensor s = saved.input(0);
    for (int i = 1; i < count; ++i) s = s + saved.input(i);
    return s;
  }
  Tensors forward(Saver& saver, std::span<const Tensor> x) {
    count = static_cast<int>(x.size());
    Tensor s = x[0];
    for (int i = 1; i < count; ++i) s = s + x[static_cast<size_t>(i)];
    saver.keep(0, s);
    Tensors y;
    for (const Tensor& t : x) y.push_back(t * s);
    return y;
  }
  void backward(const Saved& saved, std::span<const Tensor> dys, InputGradients& dx) const {
    const V kept = values(saved.kept(0));
    const V again = values(sum(saved, count));
    CHECK(kept == again);
    Tensor common = zeros_like(saved.input(0));
    for (int i = 0; i < count; ++i)
      if (dys[static_cast<size_t>(i)].defined())
        common = common + dys[static_cast<size_t>(i)] * saved.input(i);
    for (int i = 0; i < count; ++i) {
      const Tensor& dy = dys[static_cast<size_t>(i)];
      if (dx.needed(i)) dx.set(i, dy.defined() ? common + dy * sum(saved, count) : common);
    }
  }
};

/// Returns its results twice, or its input among them.
struct Twice {
  static constexpr const char* name = "twice";
  static constexpr unsigned saves = 0;
  bool input = false;
  std::array<Tensor, 2> forward(const Tensor& x) const {
    const Tensor y = input ? x : x * 3.0;
    return {y, y};
  }
  void backward(const Saved&, std::span<const Tensor> dys, InputGradients& dx) const {
    const double factor = input ? 1 : 3;
    Tensor g = zeros({2}, {.dtype = DType::f64});
    if (dys[0].defined()) g = g + dys[0] * factor;
    if (dys[1].defined()) g = g + dys[1] * (100 * factor);  // tells the outputs apart
    dx.set(0, g);
  }
};

/// Saves output 0 and reads output 1.
struct WrongOutput {
  static constexpr const char* name = "wrong_output";
  static constexpr unsigned saves = kOutput;
  std::array<Tensor, 2> forward(const Tensor& x) const { return {x * 1.0, x * 2.0}; }
  void backward(const Saved& saved, std::span<const Tensor>, InputGradients& dx) const {
    dx.set(0, saved.output(1));
  }
};

}  // namespace

TEST_CASE("an op with two results is one node; each result knows its number") {
  const Tensor x = leaf({1, -2});
  const auto [a, b] = square_and_exp(x);
  CHECK(values(a) == V{1, 4});
  CHECK(values(b)[0] == doctest::Approx(2.718281828));
  CHECK(a.node() == b.node());
  CHECK(edge_of(a) != edge_of(b));
  CHECK(a.node()->outputs() == 2);
  CHECK_FALSE(b.is_leaf());
  CHECK(std::string(b.node()->name()) == "square_and_exp");
  NoGradGuard off;
  CHECK_FALSE(square_and_exp(x)[1].requires_grad());
}

TEST_CASE("derivatives of each result, and of both, are those of finite differences") {
  const Tensor x = leaf({0.5, -1.2, 0.1});
  for (const auto& f :
       std::vector<autograd::Differentiable>{[](Inputs in) { return square_and_exp(in[0])[0]; },
                                             [](Inputs in) { return square_and_exp(in[0])[1]; },
                                             [](Inputs in) {
                                               const auto [a, b] = square_and_exp(in[0]);
                                               return a * b + b;
                                             },
                                             [](Inputs in) {
                                               const auto [a, b] = square_and_exp(in[0] * 2.0);
                                               const auto [c, d] = square_and_exp(a + b);
                                               return c * b + d * a;
                                             }}) {
    CHECK_NOTHROW(gradcheck(f, {x}));
    CHECK_NOTHROW(gradgradcheck(f, {x}));
  }
}

TEST_CASE("a result that received no gradient has an undefined one") {
  const Tensor x = leaf({1, 2});
  std::vector<bool> arrived;
  const auto [a, b] = apply(SquareAndExp{&arrived}, x);
  a.sum().backward({}, {.retain_graph = true});
  CHECK(arrived == std::vector<bool>{true, false});
  (b * 2.0).sum().backward({}, {.retain_graph = true});
  CHECK(arrived == std::vector<bool>{false, true});
  (a + b).sum().backward();
  CHECK(arrived == std::vector<bool>{true, true});
  CHECK_THROWS_WITH_AS(a.sum().backward(), Contains("freed by an earlier backward"), AutogradError);
}

TEST_CASE("a hook on a result sees its gradient alone, and replaces that one alone") {
  const Tensor x = leaf({1, 2});
  auto [a, b] = square_and_exp(x);
  int of_a = 0, of_b = 0;
  a.register_hook([&](const Tensor& g) {
    ++of_a;
    CHECK(values(g) == V{7, 7});
    return g * 10.0;
  });
  HookHandle handle = b.register_hook([&](const Tensor&) { return ++of_b, Tensor(); });
  (a * 7.0).sum().backward({}, {.retain_graph = true});
  CHECK(of_a == 1);
  CHECK(of_b == 0);
  CHECK(values(x.grad()) == V{140, 280});
  b.sum().backward({}, {.retain_graph = true});
  CHECK(of_b == 1);
  handle.remove();
  (a * 7.0 + b).sum().backward();
  CHECK(of_a == 2);
  CHECK(of_b == 1);
  auto [c, d] = square_and_exp(x);
  d.register_hook([](const Tensor&) { return ones({3}); });
  CHECK_NOTHROW(c.sum().backward({}, {.retain_graph = true}));
  CHECK_THROWS_AS(d.sum().backward(), ShapeError);
}

TEST_CASE("grad() of results and by results keeps them apart") {
  const Tensor x = leaf({1, 2});
  const auto [a, b] = square_and_exp(x);
  const Tensor y = (a * 3.0 + b * 5.0 + a * b).sum();
  const auto by = grad({y}, {b, a, b}, {}, {.retain_graph = true});
  CHECK(values(by[0]) == V{6, 9});
  CHECK(values(by[1])[0] == doctest::Approx(3 + std::exp(1.0)));
  CHECK(values(by[2]) == V{6, 9});
  const auto both = grad({a, b}, {x}, {tensor(V{1, 1}), tensor(V{10, 10})}, {.retain_graph = true});
  CHECK(values(both[0])[1] == doctest::Approx(4 + 10 * std::exp(2.0)));
  CHECK_THROWS_WITH_AS(grad({(a * 1.0).sum()}, {b}), Contains("no output depends on input 0"),
                       AutogradError);
  CHECK_FALSE(grad({(a * 1.0).sum()}, {b}, {}, {.allow_unused = true})[0].defined());
}

TEST_CASE("in place on one result, or on a view of it, the other's gradient is as before") {
  const Tensor x = leaf({1, 2});
  {
    auto [a, b] = square_and_exp(x);
    a.mul_(3.0);
    const Tensor view = a.narrow(0, 1, 1);
    a[0].mul_(5.0);
    CHECK(values(view) == V{12});
    (a + b * 0.0).sum().backward();
    CHECK(values(x.grad()) == V{30, 12});
  }
  for (bool itself : {false, true}) {
    const auto f = [&](Inputs in) {
      Tensor y = apply_list(TimesSum{}, in)[1];
      y.mul_(itself ? y : in[0]);  // whose derivative reads y as it was
      return y;
    };
    CHECK_NOTHROW(gradcheck(f, {leaf({1, 2}), leaf({0.5, -1})}));
    CHECK_NOTHROW(gradgradcheck(f, {leaf({1, 2}), leaf({0.5, -1})}));
  }
  x.set_grad({});
  auto [a, b] = square_and_exp(x);
  b.add_(1.0);  // which backward reads
  CHECK_NOTHROW(a.sum().backward({}, {.retain_graph = true}));
  CHECK_THROWS_WITH_AS(b.sum().backward(), Contains("square_and_exp"), AutogradError);
}

TEST_CASE("a tuple of a value and its index: the index has no gradient") {
  const Tensor x = leaf({1, 7, 3});
  const auto [value, index] = apply(Largest{}, x * 1.0);
  CHECK(values(value) == V{7});
  CHECK(index.item<int64_t>() == 1);
  CHECK(value.requires_grad());
  CHECK_FALSE(index.requires_grad());
  value.sum().backward();
  CHECK(values(x.grad()) == V{0, 1, 0});
}

TEST_CASE("results that are views of the input follow changes of each other") {
  const Tensor x = tensor(V{1, 2, 3, 4, 5, 6}, {3, 2}).requires_grad_();
  Tensor h = x * 1.0;
  const Tensors parts = apply(Parts{}, h);
  CHECK(parts.size() == 3);
  CHECK(parts[2].data_ptr() == h[2].data_ptr());
  Tensor(parts[1]).mul_(10.0);
  CHECK(values(h) == V{1, 2, 30, 40, 5, 6});
  (h.sum() + (parts[2] * 2.0).sum() + parts[1].sum()).backward();
  CHECK(values(x.grad()) == V{1, 1, 20, 20, 3, 3});
  const auto f = [](Inputs in) {
    const Tensors p = apply(Parts{}, in[0]);
    return p[0] * p[2] + p[0];
  };
  CHECK_NOTHROW(gradgradcheck(f, {x}));
}

TEST_CASE("a tensor that a forward returns twice, or that is its input, has two gradients") {
  const Tensor x = leaf({1, 2});
  for (bool input : {false, true}) {
    CAPTURE(input);
    const double factor = input ? 1 : 3;
    x.set_grad({});
    auto [a, b] = apply(Twice{input}, x);
    CHECK(a.data_ptr() == b.data_ptr());
    CHECK(x.is_leaf());
    (a.sum() + b.sum()).backward();
    CHECK(values(x.grad()) == V{101 * factor, 101 * factor});
    x.set_grad({});
    const Tensor h = x * 1.0;
    auto [c, d] = apply(Twice{input}, h);
    c.mul_(2.0);  // d is the same memory, so it is twice c's first value too
    CHECK(values(d) == values(c));
    d.sum().backward();
    CHECK(values(x.grad()) == V{2 * factor, 2 * factor});
  }
}

TEST_CASE("a list op of many inputs and results: gradients, keeping, versions, absent gradients") {
  const auto f = [](Inputs in) {
    const Tensors y = apply_list(TimesSum{}, in);
    return y[0] * 2.0 + y.back();
  };
  CHECK_NOTHROW(gradcheck(f, {leaf({1, 2}), leaf({3, 4}), tensor(V{5, 6}), leaf({7, 8})}));
  CHECK_NOTHROW(gradgradcheck(f, {leaf({1, 2}), leaf({3, 4}), leaf({-1, 0.5})}));
  Tensors many;
  for (int i = 0; i < 40; ++i) many.push_back(leaf({1.0 * i, 1}));
  const Tensors y = apply_list(TimesSum{}, many);
  CHECK(y[39].node()->inputs.size() == 40);
  CHECK(y[39].node()->outputs() == 40);
  (y[39] * 1.0).sum().backward();  // y39 = x39 * sum
  CHECK(values(many[3].grad()) == V{39, 1});
  CHECK(values(many[39].grad()) == V{780 + 39, 41});
  const Tensor changed = leaf({1, 2});
  const Tensors z = apply_list(TimesSum{}, Tensors{leaf({1, 2}), changed});
  {
    NoGradGuard off;
    Tensor(changed).mul_(2.0);
  }
  CHECK_THROWS_WITH_AS(z[0].sum().backward(), Contains("times_sum"), AutogradError);
}

TEST_CASE("reading an output that saves does not name is an error that says what to add") {
  const auto [a, b] = apply(WrongOutput{}, leaf({1, 2}));
  CHECK_THROWS_WITH_AS(b.sum().backward(), Contains("it reads output 1"), AutogradError);
  CHECK_THROWS_WITH_AS(apply(WrongOutput{}, leaf({1, 2}))[0].sum().backward(),
                       Contains("add kOutput << 1"), AutogradError);
}

TEST_CASE("hooks around an op see all of its results") {
  struct Swap : OpHook {
    size_t results = 0;
    bool drop = false;
    Tensors around(const OpInfo& op, std::span<const Tensor> inputs, const Run& run) override {
      Tensors ys = run();
      if (std::string(op.name) != "square_and_exp") return ys;
      CHECK(inputs.size() == 1);
      results = ys.size();
      std::swap(ys[0], ys[1]);
      if (drop) ys.pop_back();
      return ys;
    }
  } hook;
  const Tensor x = leaf({1, 2});
  const OpHookGuard guard(hook);
  const auto [e, s] = square_and_exp(x);
  CHECK(hook.results == 2);
  CHECK(values(s) == V{1, 4});
  s.sum().backward();
  CHECK(values(x.grad()) == V{2, 4});
  hook.drop = true;
  CHECK_THROWS_WITH_AS(square_and_exp(x), Contains("returned 1 results, and the op has 2"), Error);
}

TEST_CASE("watchers are told of a node with several results once") {
  struct Watcher : BackwardWatcher {
    std::vector<uint64_t> nodes;
    int ready = 0;
    void backward_runs(std::span<const uint64_t> n) override { nodes.assign(n.begin(), n.end()); }
    void backward_starts(std::span<Leaf* const>) override {}
    void leaf_ready(Leaf&) override { ++ready; }
    void backward_ends(bool) override {}
  } watcher;
  const Tensor x = leaf({1, 2});
  x.leaf()->watcher = &watcher;
  const auto [a, b] = square_and_exp(x);
  (a + b).sum().backward();
  CHECK(watcher.ready == 1);
  CHECK(std::count(watcher.nodes.begin(), watcher.nodes.end(), a.node()->sequence) == 1);
  CHECK(watcher.nodes.size() == 4);  // x, the op, add, sum
  x.leaf()->watcher = nullptr;
}

TEST_CASE("a chain of 200,000 nodes with two results is run and destroyed without recursion") {
  const Tensor x = leaf({0, 0});
  Tensor a = x, b = x;
  for (int i = 0; i < 100000; ++i) {
    auto [c, d] = apply(Twice{true}, a);
    a = d;
    b = c;
  }
  b = Tensor();
  CHECK(values(a) == V{0, 0});
}

TEST_CASE("random graphs of ops with two results have the gradients of graphs of single ones") {
  std::mt19937 random(11);
  for (int graph = 0; graph < 30; ++graph) {
    const Tensor x = leaf({0.3, -0.2}), w = leaf({0.1, 0.4});
    V gradients[2][2];
    const unsigned seed = random();
    for (bool pairs : {false, true}) {
      std::mt19937 choice(seed);
      Tensors made{x, w};
      for (int step = 0; step < 12; ++step) {
        const Tensor in = made[choice() % made.size()] * 0.5 + made[choice() % made.size()] * 0.25;
        if (pairs) {
          auto [a, b] = square_and_exp(in);
          made.push_back(a);
          made.push_back(b);
        } else {
          made.push_back(in * in);
          made.push_back(exp(in));
        }
        if (choice() % 3 == 0) made[made.size() - 2].add_(made[choice() % made.size()] * 0.5);
      }
      Tensor total = made.back() * 1.0;
      for (int i = 0; i < 3; ++i) total = total + made[choice() % made.size()];
      x.set_grad({});
      w.set_grad({});
      total.sum().backward();
      if (x.grad().defined()) gradients[pairs][0] = values(x.grad());
      if (w.grad().defined()) gradients[pairs][1] = values(w.grad());
    }
    for (int k : {0, 1})
      for (size_t i = 0; i < gradients[0][k].size(); ++i)
        CHECK(gradients[1][k][i] == doctest::Approx(gradients[0][k][i]).epsilon(1e-9));
  }
}

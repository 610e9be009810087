// The walk of backward: what it adds up and in which order, what it refuses, what it keeps alive
// and what it lets go. Hooks, watchers and slots have a file of their own.
#include <doctest/doctest.h>
#include <pthread.h>

#include <cmath>
#include <thread>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using autograd::grad;
using doctest::Approx;
using doctest::Contains;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }
Tensor leaf(double v) { return scalar(v, {.dtype = DType::f64, .requires_grad = true}); }

/// A leaf whose bytes report when they are let go.
Tensor watched_leaf(std::vector<double>& bytes, int& released) {
  return from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())},
                   {.dtype = DType::f64, .requires_grad = true}, [&released] { ++released; });
}

/// Runs f on a thread whose stack a recursion of some thousand calls overflows.
void on_a_small_stack(void (*f)()) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  REQUIRE(pthread_attr_setstacksize(&attributes, 512 * 1024) == 0);
  pthread_t thread;
  const auto run = [](void* p) -> void* { return reinterpret_cast<void (*)()>(p)(), nullptr; };
  REQUIRE(pthread_create(&thread, &attributes, run, reinterpret_cast<void*>(f)) == 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace

// ---- sums over paths ----

TEST_CASE("a diamond adds up both of its sides, each node running once") {
  const Tensor x = leaf({2, 3});
  const Tensor a = x * x, b = a * 3.0, c = a * a;  // y = 3 x^2 + x^4
  (b + c).sum().backward();
  CHECK(values(x.grad()) == V{6 * 2 + 4 * 8, 6 * 3 + 4 * 27});
}

TEST_CASE("deep ladders of diamonds take time by their nodes, not by their paths") {
  const Tensor x = leaf(1);
  Tensor y = x;
  for (int i = 0; i < 200; ++i) y = (y + y) * 0.5;  // 2^200 paths
  y.backward();
  CHECK(x.grad().item<double>() == 1);
}

TEST_CASE("a tensor used twice by one op gets both gradients") {
  const Tensor x = leaf({2, 3});
  (x * x).sum().backward();
  CHECK(values(x.grad()) == V{4, 6});
  const Tensor m = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_();
  matmul(m, m).sum().backward();  // d/dM sum(M M) = M^T-sums: row sums and column sums
  CHECK(values(m.grad()) == V{3 + 4, 7 + 4, 3 + 6, 7 + 6});
}

TEST_CASE("gradients accumulate over backwards until they are cleared") {
  const Tensor x = leaf({1, 2});
  CHECK_FALSE(x.grad().defined());
  (x * 2.0).sum().backward();
  (x * x).sum().backward();
  CHECK(values(x.grad()) == V{4, 6});
  x.set_grad({});
  CHECK_FALSE(x.grad().defined());
  (x * 3.0).sum().backward();
  CHECK(values(x.grad()) == V{3, 3});
}

TEST_CASE(
    "gradients of several leaves do not share memory with one another or with what the caller "
    "passed") {
  const Tensor start = tensor(V{5, 6});
  for (bool record : {false, true}) {
    const Tensor a = leaf({1, 2}), b = leaf({3, 4}), x = leaf({1, 2});
    (a + b).backward(start, {.create_graph = record});
    a.grad().add_(100);
    CHECK(values(b.grad()) == V{5, 6});
    x.backward(start, {.create_graph = record});  // a leaf is its own root
    x.grad().fill_(0);
    CHECK(values(start) == V{5, 6});
  }
}

TEST_CASE("a gradient that is a broadcast number becomes real memory, and others add to it") {
  const Tensor x = leaf({1, 2, 3, 4});
  x.mean().backward();
  CHECK_NOTHROW(x.grad().mul_(4));
  CHECK(values(x.grad()) == V{1, 1, 1, 1});
  x.set_grad({});
  (x.mean() * 4.0 + x.square().sum() + (x * 2.0).mean() * 4.0).backward();
  CHECK(values(x.grad()) == V{5, 7, 9, 11});
}

TEST_CASE("what no path reaches keeps its gradient undefined") {
  const Tensor x = leaf({1}), unused = leaf({1});
  x.sum().backward();
  CHECK_FALSE(unused.grad().defined());
}

TEST_CASE("backward starts from one element, or from a gradient of the right shape and dtype") {
  const Tensor x = leaf({1, 2});
  CHECK_THROWS_WITH_AS((x * 2.0).backward(), Contains("[2]"), AutogradError);
  CHECK_THROWS_AS((x * 2.0).backward(ones({3}, {.dtype = DType::f64})), ShapeError);
  CHECK_THROWS_AS((x * 2.0).backward(ones({2})), DTypeError);
  CHECK_THROWS_AS(ones({1}).backward(), AutogradError);
  CHECK_THROWS_AS((x * 2.0).sum().detach().backward(), AutogradError);
  (x * 2.0).backward(tensor(V{1, 10}));
  CHECK(values(x.grad()) == V{2, 20});
  CHECK_THROWS_AS(x.set_grad(ones({3}, {.dtype = DType::f64})), ShapeError);
  CHECK_THROWS_AS(x.set_grad(ones({2})), DTypeError);
  CHECK_THROWS_AS((x * 2.0).set_grad(ones({2}, {.dtype = DType::f64})), AutogradError);
  CHECK_THROWS_AS(arange(0, 2).set_grad(arange(0, 2)), AutogradError);
  CHECK_THROWS_AS(x.set_grad(x), AutogradError);
  const Tensor constant = ones({2});  // PyTorch lets any leaf hold a gradient
  constant.set_grad(full({2}, 3));
  CHECK(values(constant.grad()) == V{3, 3});
  CHECK_FALSE(constant.requires_grad());
}

// ---- the life of a graph ----

TEST_CASE("a second backward needs the graph retained") {
  const Tensor x = leaf({2});
  const Tensor y = (x * x).sum();
  y.backward({}, {.retain_graph = true});
  y.backward();
  CHECK(values(x.grad()) == V{8});
  CHECK_THROWS_WITH_AS(y.backward(), Contains("retain_graph"), AutogradError);
  CHECK_THROWS_WITH_AS(y.backward(), Contains("mul"), AutogradError);
  CHECK(values(x.grad()) == V{8});
}

TEST_CASE("bytes are let go with the last handle or graph that needs them") {
  V bytes{1, 2, 3};
  int released = 0;
  Tensor y;
  {
    const Tensor x = watched_leaf(bytes, released);
    y = exp(x * x).sum();
  }
  CHECK(released == 0);  // saved for backward
  SUBCASE("dropped unused") {}
  SUBCASE("after backward") { y.backward(); }
  SUBCASE("after its recorded derivative") {
    const Tensor w = leaf(1);
    const Tensor dw = grad({w * y}, {w}, {}, {.create_graph = true})[0];
    CHECK(dw.requires_grad());
  }
  y = Tensor();
  CHECK(released == 1);
}

TEST_CASE("a backward frees what was saved, even while the result lives") {
  V bytes{1, 2, 3};
  int released = 0;
  Tensor y;
  {
    const Tensor x = from_blob(bytes.data(), {3}, {.dtype = DType::f64}, [&] { ++released; });
    y = (leaf({1, 1, 1}) * x).sum();
  }
  CHECK(released == 0);
  y.backward();
  CHECK(released == 1);
  CHECK(y.item<double>() == 6);
}

TEST_CASE("an op that saves its output makes no cycle") {
  const Tensor x = leaf({0.5});
  const Ref<TensorBody> body = exp(x).ref();  // the only handle left
  CHECK(body->use_count() == 1);
  const Tensor y = sigmoid(x);
  const int64_t uses = y.node()->use_count();
  CHECK(uses == 1);
  CHECK(y.ref()->use_count() == 1);
}

TEST_CASE("a leaf may go before its graph: its gradient has nobody to go to") {
  Tensor y;
  int called = 0;
  {
    const Tensor x = leaf({2});
    x.register_post_accumulate_grad_hook([&](const Tensor&) { ++called; });
    y = (x + 1.0).sum();  // keeps the leaf's node, not its tensor
  }
  CHECK_NOTHROW(y.backward());
  CHECK(called == 0);
}

TEST_CASE("a chain of 100,000 ops runs forward and backward and is destroyed without recursion") {
  on_a_small_stack([] {
    const Tensor x = leaf(0);
    {
      Tensor y = x;
      for (int i = 0; i < 100000; ++i) y = y + 1.0;
      CHECK(y.item<double>() == 100000);
      y.backward();
      CHECK(x.grad().item<double>() == 1);
    }
    Tensor z = x;
    for (int i = 0; i < 100000; ++i) z = sigmoid(z);  // each node holds a tensor
    z = Tensor();
    Tensor w = x;
    for (int i = 0; i < 100000; ++i) w = w * w;  // each node holds the tensor before
    w = Tensor();
    CHECK(x.ref()->use_count() == 1);
  });
}

// ---- grad mode ----

TEST_CASE("grad mode is a stack of guards") {
  const Tensor x = leaf({1});
  CHECK(is_grad_enabled());
  {
    NoGradGuard off;
    CHECK_FALSE((x * 2.0).requires_grad());
    {
      EnableGradGuard on;
      CHECK((x * 2.0).requires_grad());
    }
    CHECK_FALSE(is_grad_enabled());
    CHECK(leaf({1}).requires_grad());  // leaves can be made anywhere
  }
  CHECK((x * 2.0).requires_grad());
}

TEST_CASE("backward of what has no graph says where the graph may have ended") {
  const Tensor x = leaf({1, 2});
  CHECK_THROWS_WITH_AS(x.detach().sum().backward(), Contains("detach()ed"), AutogradError);
  CHECK_THROWS_WITH_AS(autograd::grad({x.detach().sum()}, {x}), Contains("detach()ed"),
                       AutogradError);
  NoGradGuard off;
  CHECK_THROWS_WITH_AS(x.square().sum().backward(), Contains("under NoGradGuard or in a backward"),
                       AutogradError);
}

TEST_CASE("grad mode belongs to a thread") {
  NoGradGuard off;
  bool there = false;
  std::thread([&] {
    there = is_grad_enabled();
    set_grad_enabled(true);
  }).join();
  CHECK(there);
  CHECK_FALSE(is_grad_enabled());
}

TEST_CASE("two threads may run backwards over graphs of their own") {
  std::vector<std::thread> threads;
  std::vector<double> got(4);
  for (size_t t = 0; t < got.size(); ++t)
    threads.emplace_back([&, t] {
      const Tensor x = leaf(static_cast<double>(t));
      for (int i = 0; i < 200; ++i) (x * x).backward();
      got[t] = x.grad().item<double>();
    });
  for (std::thread& t : threads) t.join();
  CHECK(got == V{0, 400, 800, 1200});
}

TEST_CASE("detach leaves the graph and shares the bytes; a detached tensor can become a leaf") {
  const Tensor x = leaf({1, 2});
  Tensor d = (x * 3.0).detach();
  CHECK_FALSE(d.requires_grad());
  CHECK(d.is_leaf());
  CHECK(x.detach().data_ptr() == x.data_ptr());
  d.requires_grad_();
  (d * x).sum().backward();
  CHECK(values(d.grad()) == V{1, 2});
  CHECK(values(x.grad()) == V{3, 6});
  CHECK_THROWS_WITH_AS((x * 3.0).requires_grad_(), Contains("mul"), AutogradError);
  CHECK_THROWS_WITH_AS(arange(0, 2).requires_grad_(), Contains("i64"), DTypeError);
}

// ---- frozen ----

TEST_CASE("a frozen leaf keeps its gradient, and no backward adds to it") {
  Tensor x = leaf({1, 2});
  const Tensor other = leaf({3, 5});
  const Tensor before = (x * other).sum(), later = (x * other).sum();
  before.backward();
  x.requires_grad_(false);
  CHECK_FALSE(x.requires_grad());
  CHECK(x.is_leaf());
  CHECK(x.leaf() == nullptr);
  CHECK(values(x.grad()) == V{3, 5});
  (x * other).sum().backward();
  later.backward();  // of the time when it was trained
  CHECK(values(x.grad()) == V{3, 5});
  CHECK(values(other.grad()) == V{3, 6});
  CHECK_THROWS_WITH_AS(grad({other.sum()}, {x}), Contains("input 0"), AutogradError);
  CHECK_THROWS_AS(x.sum().backward(), AutogradError);
  CHECK_NOTHROW(x.add_(1));  // not recorded: {2, 3}
  for (const Tensor& made : {x.detach(), x.clone(), x.to(DType::f32)})
    CHECK_FALSE(made.grad().defined());

  x.requires_grad_();
  CHECK(values(x.grad()) == V{3, 5});
  (x * other).sum().backward();
  CHECK(values(x.grad()) == V{6, 10});
  CHECK(values(other.grad()) == V{5, 9});
}

TEST_CASE("the gradient of a frozen leaf can be assigned and cleared") {
  Tensor x = leaf({1, 2});
  x.requires_grad_(false);
  CHECK_FALSE(x.grad().defined());
  x.set_grad(tensor(V{7, 8}));
  CHECK(values(x.grad()) == V{7, 8});
  CHECK_THROWS_AS(x.set_grad(tensor(V{7})), ShapeError);
  x.requires_grad_();
  (x * 2.0).sum().backward();
  CHECK(values(x.grad()) == V{9, 10});
  x.requires_grad_(false);
  x.set_grad({});
  x.requires_grad_();
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("a backward whose leaves were all frozen since does nothing") {
  Tensor x = leaf({1, 2});
  const Tensor y = (exp(x) * x).sum();
  x.requires_grad_(false);
  y.backward();
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("a frozen tensor's gradient goes with it, and it may go before its graph") {
  V bytes{1, 2, 3}, gradient_bytes{0, 0, 0};
  int released = 0, gradient_released = 0;
  Tensor y;
  {
    Tensor x = watched_leaf(bytes, released);
    x.set_grad(from_blob(gradient_bytes.data(), {3}, {.dtype = DType::f64},
                         [&gradient_released] { ++gradient_released; }));
    y = x.sum();  // saves nothing
    x.requires_grad_(false);
    CHECK(values(x.grad()) == V{0, 0, 0});
  }
  CHECK(released == 1);
  y.backward();
  y = Tensor();
  CHECK(gradient_released == 1);
  CHECK(gradient_bytes == V{0, 0, 0});
}

TEST_CASE("a leaf may be frozen while another thread walks graphs that reach it") {
  constexpr int kGraphs = 300;
  Tensor x = leaf({1, 2});
  std::vector<Tensor> graphs;
  for (int i = 0; i < kGraphs; ++i) graphs.push_back((x * 3.0).sum());
  std::thread walk([&] {
    for (const Tensor& y : graphs) y.backward();
  });
  x.requires_grad_(false);
  walk.join();
  const Tensor kept = x.grad();
  const double times = kept.defined() ? kept.sum().item<double>() / 6 : 0;
  CHECK(times == std::floor(times));
  CHECK(times <= kGraphs);
  x.requires_grad_();
  (x * 3.0).sum().backward();
  CHECK(values(x.grad()) == V{3 * times + 3, 3 * times + 3});
}

// ---- grad() ----

TEST_CASE("grad returns gradients and touches no leaf") {
  const Tensor x = leaf({1, 2}), y = leaf({3, 4}), h = x * y;
  const auto g = grad({(h * h).sum()}, {x, h, y}, {}, {});
  CHECK(values(g[0]) == V{18, 64});
  CHECK(values(g[1]) == V{6, 16});
  CHECK(values(g[2]) == V{6, 32});
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("grad takes inputs twice, outputs twice, an output as input, and weights of its own") {
  const Tensor x = leaf({1, 2});
  const Tensor y = x * x;
  auto g = grad({y}, {x, x, y}, {tensor(V{1, 10})}, {.retain_graph = true});
  CHECK(values(g[0]) == V{2, 40});
  CHECK(values(g[1]) == V{2, 40});
  CHECK(values(g[2]) == V{1, 10});
  g = grad({y, y, y.sum()}, {x}, {tensor(V{1, 0}), tensor(V{1, 1}), Tensor()}, {});
  CHECK(values(g[0]) == V{2 * 3, 4 * 2});
  CHECK_THROWS_AS(grad({y}, {x}, {ones({2}), ones({2})}), ValueError);
  CHECK_THROWS_AS(grad({y}, {x}), AutogradError);  // two elements need weights
}

TEST_CASE("an input that no output depends on is an error, or undefined where that is allowed") {
  const Tensor x = leaf({1}), other = leaf({1});
  const Tensor y = x.sum();
  CHECK_THROWS_WITH_AS(grad({y}, {x, other}), Contains("input 1"), AutogradError);
  CHECK_THROWS_WITH_AS(grad({y}, {x, other}), Contains("allow_unused"), AutogradError);
  const auto g = grad({y}, {x, other}, {}, {.allow_unused = true});
  CHECK(g[0].defined());
  CHECK_FALSE(g[1].defined());
  CHECK_THROWS_WITH_AS(grad({y}, {ones({1})}), Contains("input 0"), AutogradError);
}

TEST_CASE("grad frees the graph unless told to retain it") {
  const Tensor x = leaf({3});
  const Tensor y = (x * x).sum();
  grad({y}, {x}, {}, {.retain_graph = true});
  CHECK(values(grad({y}, {x})[0]) == V{6});
  CHECK_THROWS_AS(grad({y}, {x}), AutogradError);
}

// ---- higher derivatives ----

TEST_CASE("derivatives to the fourth order, by recording each backward") {
  const Tensor x = leaf(0.7);
  Tensor y = exp(x * 2.0) + x * x * x;
  const double e = std::exp(1.4);
  const double want[] = {2 * e + 3 * 0.49, 4 * e + 6 * 0.7, 8 * e + 6, 16 * e};
  for (double w : want) {
    y = grad({y}, {x}, {}, {.create_graph = true})[0];
    CHECK(y.item<double>() == Approx(w));
  }
}

TEST_CASE("backward with create_graph leaves a gradient that can be differentiated") {
  const Tensor x = leaf({2, 3});
  (x * x * x).sum().backward({}, {.create_graph = true});
  const Tensor g = x.grad();
  CHECK(g.requires_grad());
  CHECK(values(grad({g.sum()}, {x})[0]) == V{12, 18});
  x.set_grad({});  // a gradient with a graph keeps its leaf alive
}

TEST_CASE("a gradient penalty trains: first derivatives inside a loss") {
  const Tensor w = leaf({0.5, -1}), x = leaf({1, 2});
  const Tensor slope =
      grad({tanh((w * x).sum())}, {x}, {}, {.create_graph = true})[0];  // w (1 - tanh^2)
  slope.square().sum().backward();
  const double t = std::tanh(-1.5), d = 1 - t * t, n = 1.25;
  CHECK(values(w.grad())[0] == Approx(2 * 0.5 * d * d - 4 * n * d * d * t * 1));
  CHECK(values(w.grad())[1] == Approx(2 * -1 * d * d - 4 * n * d * d * t * 2));
}

// ---- in-place changes ----

TEST_CASE("changing a saved tensor in place is found out by backward") {
  const Tensor x = leaf({1, 2});
  Tensor w = tensor(V{3, 4});
  const Tensor y = (x * w).sum();
  w.add_(1);
  CHECK_THROWS_WITH_AS(y.backward(), Contains("backward of mul"), AutogradError);
  CHECK_THROWS_WITH_AS(y.backward(), Contains("changed in place"), AutogradError);
  CHECK_FALSE(x.grad().defined());
  const Tensor z = (x * 2.0 + w).sum();  // sums save nothing
  w.add_(1);
  CHECK_NOTHROW(z.backward());
}

TEST_CASE("a change through a view, a detached handle or an optimizer's guard counts as well") {
  const Tensor x = leaf({1, 2});
  Tensor w = leaf({3, 4});
  const Tensor y = (x * w).sum();
  SUBCASE("view") { w.detach().narrow(0, 0, 1).fill_(0); }
  SUBCASE("guard") {
    NoGradGuard off;
    w.mul_(2);
  }
  CHECK_THROWS_AS(y.backward(), AutogradError);
}

TEST_CASE("an in-place op on a tensor within the graph is part of the graph") {
  const Tensor x = leaf({1, 2});
  Tensor y = x * 3.0;
  y.mul_(x).add_(x, 10).mul_(2);  // 2 (3 x^2 + 10 x)
  y.sum().backward();
  CHECK(values(x.grad()) == V{32, 44});
  Tensor leaf_itself = x;
  CHECK_THROWS_WITH_AS(leaf_itself.mul_(2), Contains("leaf"), AutogradError);
}

TEST_CASE("backward of what was computed without grad mode names the guard") {
  const Tensor x = ones({1}).requires_grad_();
  const NoGradGuard guard;
  CHECK_THROWS_WITH_AS((x * 2.0).backward(), doctest::Contains("under NoGradGuard"), AutogradError);
}

// Hooks and kept gradients in a training loop: hooks that remove others while they run, throw, run
// another backward or stand on results in the middle of a graph; and gradients that are kept over
// many steps. What a single hook does is node_test.cpp's.
#include <doctest/doctest.h>

#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/nn/nn.h>
#include <lockstep/optim/optim.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

}  // namespace

TEST_CASE("register_hook: a hook that another one removed is silent from the next backward on") {
  const Tensor x = leaf({1, 2});
  const Tensor y = x * 3.0;
  for (const Tensor& t : {x, y}) {
    int first = 0, second = 0;
    HookHandle victim;
    HookHandle killer = t.register_hook([&](const Tensor&) {
      ++first;
      victim.remove();
      return Tensor();
    });
    victim = t.register_hook([&](const Tensor& g) { return ++second, g * 1.0; });
    y.sum().backward({}, {.retain_graph = true});
    const int seen = second;
    y.sum().backward({}, {.retain_graph = true});
    CHECK(first == 2);
    CHECK(second == seen);
    CHECK(seen <= 1);
    killer.remove();
  }
  CHECK(values(x.grad()) == V{12, 12});
}

TEST_CASE(
    "register_hook: one that throws in the middle of a graph leaves leaves without half a sum") {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  const Tensor h = x * w;
  HookHandle thrower = h.register_hook([](const Tensor&) -> Tensor { throw 1; });
  const Tensor loss = (h + w * 2.0).sum();
  CHECK_THROWS_AS(loss.backward({}, {.retain_graph = true}), int);
  CHECK_FALSE(x.grad().defined());
  CHECK_FALSE(w.grad().defined());
  thrower.remove();
  loss.backward();
  CHECK(values(x.grad()) == V{3, 4});
  CHECK(values(w.grad()) == V{3, 4});
}

TEST_CASE("register_hook: a hook may run backward and grad() of other graphs, and of its own") {
  const Tensor x = leaf({1, 2}), other = leaf({5});
  const Tensor h = x * x;
  V inner;
  h.register_hook([&](const Tensor&) {
    const EnableGradGuard guard;
    (other * 2.0).backward();
    inner = values(autograd::grad({(x * 7.0).sum()}, {x})[0]);
    return Tensor();
  });
  h.sum().backward();
  CHECK(values(x.grad()) == V{2, 4});
  CHECK(values(other.grad()) == V{2});
  CHECK(inner == V{7, 7});
}

TEST_CASE("register_hook: what it returns is differentiated where the backward is recorded") {
  const Tensor x = leaf({2});
  const Tensor h = x * x;
  h.register_hook([](const Tensor& g) { return g * g * 5.0; });
  const Tensor g =
      autograd::grad({h * 3.0}, {x}, {ones({1}, {.dtype = DType::f64})}, {.create_graph = true})[0];
  CHECK(values(g) == V{5 * 9 * 4});                     // 5 (3)^2 2x
  CHECK(values(autograd::grad({g}, {x})[0]) == V{90});  // in x alone
}

TEST_CASE("register_hook: one that owns the last handle of its tensor's result") {
  const Tensor x = leaf({1});
  int calls = 0;
  {
    const Tensor y = x * 2.0;
    y.register_hook([&calls, kept = ones({3})](const Tensor& g) {
      ++calls;
      return g * kept[0].to(DType::f64);
    });
    y.backward();
  }
  CHECK(calls == 1);
  CHECK(values(x.grad()) == V{2});
}

TEST_CASE("grad: gradients that are kept do not change over ten steps") {
  for (const bool none : {true, false}) {
    CAPTURE(none);
    manual_seed(5);
    nn::Sequential net{nn::Linear{4, 6}, nn::ReLU{}, nn::LayerNorm{6}, nn::Linear{6, 2}};
    optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}};
    std::vector<Tensor> kept;
    std::vector<V> copies;
    const auto keep = [&](const Tensor& g) {
      kept.push_back(g);
      copies.push_back(values(g));
    };
    for (const Tensor& p : net.parameters())
      p.register_hook([&](const Tensor& g) { return keep(g), Tensor(); });
    const auto same = [&] {
      for (size_t i = 0; i < kept.size(); ++i)
        if (values(kept[i]) != copies[i]) return false;
      return true;
    };
    for (int step = 0; step < 10; ++step) {
      opt.zero_grad(none);
      CHECK(same());
      for (int part = 0; part < 2; ++part) {  // accumulates
        const Tensor h = net(randn({3, 4}));
        h.register_hook([&](const Tensor& g) { return keep(g), Tensor(); });
        h.square().sum().backward();
        CHECK(same());
      }
      optim::clip_grad_norm_(net.parameters(), 0.1);
      CHECK(same());
      for (const Tensor& p : net.parameters()) keep(p.grad());
      opt.step();
      CHECK(same());
    }
    CHECK(kept.size() == 10 * (2 * (6 + 1) + 6));
  }
}

TEST_CASE("register_hook: a gradient of another dtype is refused, of a leaf and of a result") {
  const auto to_f64 = [](const Tensor& g) { return g.to(DType::f64); };
  const Tensor x = ones({3}).requires_grad_();
  x.register_hook(to_f64);
  CHECK_THROWS_AS((x * 2.0).sum().backward(), DTypeError);
  CHECK_FALSE(x.grad().defined());
  const Tensor w = ones({3}).requires_grad_(), y = w * w;
  y.register_hook(to_f64);
  CHECK_THROWS_WITH_AS(y.sum().backward(), doctest::Contains("f64 for a tensor of f32"), DTypeError);
}

// A backward inside a node's backward: a node that runs forward code again and differentiates it, as
// activation checkpointing by re-entry does.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/lockstep.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using F = std::function<Tensor(const Tensor&)>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

/// f(x), of which nothing is kept: backward runs f again on a detached x and differentiates that.
struct Rerun {
  static constexpr const char* name = "rerun";
  static constexpr unsigned saves = kInput(0);
  F f;
  bool by_grad = false;  // without leaves in f
  Tensor forward(const Tensor& x) const { return f(x); }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    CHECK_FALSE(is_grad_enabled());
    const Tensor x = saved.input(0).detach().requires_grad_();
    {
      const EnableGradGuard on;
      const Tensor y = f(x);
      if (by_grad)
        x.set_grad(autograd::grad({y}, {x}, {dy})[0]);
      else
        y.backward(dy);
      CHECK(is_grad_enabled());
    }
    CHECK_FALSE(is_grad_enabled());
    dx.set(0, x.grad());
  }
};
Tensor rerun(const F& f, const Tensor& x) { return apply(Rerun{f}, x); }

/// matmul(x, w), which asks for w's slot before it differentiates `inner`.
struct SlotFirst {
  static constexpr const char* name = "slot_first";
  static constexpr unsigned saves = kInput(0) | kInput(1);
  std::function<void()> inner;
  Tensor forward(const Tensor& x, const Tensor& w) const { return matmul(x, w); }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor dw = matmul(saved.input(0).t(), dy);
    Tensor place = dx.destination(1);
    if (place.defined()) place.copy_(dw);
    inner();
    dx.set(1, place.defined() ? place : dw);
    if (dx.needed(0)) dx.none(0);
  }
};

/// A backward by itself that adds `factor` to each element of w's gradient.
void add_to(const Tensor& w, double factor) {
  const EnableGradGuard on;
  (w * factor).sum().backward();
}

struct Counts : BackwardWatcher {
  int starts = 0, ends = 0, failed = 0, ready = 0, open = 0, deepest = 0;
  void backward_starts(std::span<Leaf* const>) override {
    ++starts;
    deepest = std::max(deepest, ++open);
  }
  void leaf_ready(Leaf&) override { ++ready; }
  void backward_ends(bool with_failure) override {
    --open;
    ++ends;
    failed += with_failure;
  }
};

}  // namespace

TEST_CASE("a node that runs forward code again gives the gradients of that code") {
  const Tensor x = leaf({0.3, -0.4}), w = leaf({0.5, 2});
  const F f = [&](const Tensor& t) { return exp(t * w) + t; };
  const auto gradients = [&](bool again) {
    x.set_grad({});
    w.set_grad({});
    Tensor h = x * 2.0;
    h = again ? rerun(f, h) : f(h);
    (h * h).sum().backward();
    return std::pair(values(x.grad()), values(w.grad()));
  };
  CHECK(gradients(true) == gradients(false));
  Tensor h = apply(Rerun{[](const Tensor& t) { return t * t; }, true}, x);
  x.set_grad({});
  h.sum().backward();
  CHECK(values(x.grad()) == V{0.6, -0.8});
}

TEST_CASE("inner and outer backward add to the same leaves, also three deep") {
  const Tensor x = leaf({0.3, -0.4}), w = leaf({0.5, 2});
  const F plain = [&](const Tensor& t) { return exp(t * w) * w; };
  const F deep = [&](const Tensor& t) {
    return rerun([&](const Tensor& u) { return rerun(plain, u * w) + plain(u); }, t);
  };
  const F flat = [&](const Tensor& t) { return plain(t * w) + plain(t); };
  const auto gradients = [&](const F& f) {
    x.set_grad({});
    w.set_grad({});
    Tensor h = x * w;
    for (int i = 0; i < 2; ++i) h = f(h) * w;
    (h.sum() + (w * w).sum()).backward();
    return std::pair(x.grad(), w.grad());
  };
  const auto expected = gradients(flat), got = gradients(deep);
  for (size_t i : {0, 1}) {
    CHECK(values(got.first)[i] == doctest::Approx(values(expected.first)[i]).epsilon(1e-12));
    CHECK(values(got.second)[i] == doctest::Approx(values(expected.second)[i]).epsilon(1e-12));
  }
}

TEST_CASE("an outer contribution that waits in a leaf's slot survives an inner backward") {
  // The inner backward comes before, within or after the node that fills the slot.
  const Tensor x = tensor(V{1, 2}, {1, 2});
  const auto gradient = [&](bool with_slot, int order) {
    const Tensor w = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_();
    const Tensor slot = full({2, 2}, 99, {.dtype = DType::f64});
    if (with_slot) w.leaf()->slot = slot;
    const Tensor v = leaf({1, 1});
    const auto again = [&] { return rerun([&](const Tensor& t) { return t * w; }, v).sum(); };
    const auto product = [&] { return matmul(x, w).sum(); };
    Tensor loss;
    if (order == 0) {
      const Tensor first = product();  // runs last
      loss = first + again();
    } else if (order == 1) {
      const Tensor first = again();
      loss = first + product();
    } else if (order == 2) {
      loss = apply(SlotFirst{[&] { add_to(w, 10); }}, x, w).sum();
    } else {  // the outer walk adds twice, with an inner one between
      const Tensor first = product(), second = again();
      loss = first + second + product();
    }
    for (int i = 0; i < 2; ++i) loss.backward({}, {.retain_graph = true});
    if (with_slot) {
      CHECK(w.grad().is_same(slot));
      CHECK_FALSE(w.leaf()->slot_lent);
      w.leaf()->slot = Tensor();
    }
    return values(w.grad());
  };
  for (int order : {0, 1, 2, 3}) {
    CAPTURE(order);
    CHECK(gradient(true, order) == gradient(false, order));
  }
  CHECK(gradient(true, 2) == V{2 + 20, 2 + 20, 4 + 20, 4 + 20});
}

TEST_CASE("watchers are told of each backward, the inner one within the outer one") {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  Counts watcher;
  w.leaf()->watcher = &watcher;
  (rerun([&](const Tensor& t) { return t * w; }, x).sum() + w.sum()).backward();
  CHECK(values(w.grad()) == V{2, 3});
  CHECK(watcher.starts == 2);
  CHECK(watcher.ends == 2);
  CHECK(watcher.ready == 2);
  CHECK(watcher.deepest == 2);
  CHECK(watcher.failed == 0);
  w.leaf()->watcher = nullptr;
}

TEST_CASE("an error inside unwinds both, and the next backward is right") {
  const Tensor x = leaf({1, 2}), w = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_();
  const Tensor slot = full({2, 2}, 99, {.dtype = DType::f64});
  w.leaf()->slot = slot;
  Counts watcher;
  w.leaf()->watcher = &watcher;
  bool fails = true;
  const Tensor row = tensor(V{1, 2}, {1, 2});
  const auto loss = [&] {
    const Tensor last = (w * 0.0).sum();  // w's contribution from the product waits for this one
    const Tensor early = apply(Rerun{[&](const Tensor& t) {
                                 Tensor h = t * w;
                                 if (!is_grad_enabled()) return h;
                                 h.register_hook([&](const Tensor&) -> Tensor {
                                   if (fails) throw std::runtime_error("inside");
                                   return {};
                                 });
                                 return h;
                               }},
                               x);
    return last + early.sum() + matmul(row, w).sum();
  };
  CHECK_THROWS_WITH_AS(loss().backward(), "inside", std::runtime_error);
  CHECK(is_grad_enabled());
  CHECK(watcher.failed == 2);
  CHECK(watcher.open == 0);
  CHECK_FALSE(w.leaf()->slot_lent);
  CHECK_FALSE(w.grad().defined());
  fails = false;
  x.set_grad({});
  loss().backward();
  CHECK(values(w.grad()) == V{1 + 1, 2 + 1, 1 + 2, 2 + 2});
  CHECK(w.grad().is_same(slot));
  CHECK(values(x.grad()) == V{1 + 3, 2 + 4});
  w.leaf()->slot = Tensor();
  w.leaf()->watcher = nullptr;
}

TEST_CASE("a backward inside a hook, of the tensor and of the leaf, and inside an unpack hook") {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  int calls = 0;
  Tensor h = x * w;
  h.register_hook([&](const Tensor&) { return add_to(w, 100), Tensor(); });
  w.register_post_accumulate_grad_hook([&](const Tensor&) {
    if (++calls == 1) add_to(x, 1000);
  });
  h.sum().backward();
  CHECK(values(w.grad()) == V{101, 102});
  CHECK(values(x.grad()) == V{1003, 1004});
  CHECK(calls == 2);
  x.set_grad({});
  {
    const autograd::SavedTensorHooks guard{[](const Tensor& t) { return t; },
                                           [&](const Tensor& t) { return add_to(x, 10), t; }};
    h = exp(x);
  }
  h.sum().backward();
  CHECK(values(x.grad())[0] == doctest::Approx(10 + std::exp(1.0)));
}

TEST_CASE("guards that a node opens inside backward end with it, and threads do not meet") {
  struct Names : OpHook {
    int seen = 0;
    std::vector<Tensor> around(const OpInfo&, std::span<const Tensor>, const Run& run) override {
      ++seen;
      return run();
    }
  } hook;
  int packed = 0;
  const F f = [&](const Tensor& t) {
    if (!is_grad_enabled()) return exp(t);
    const OpHookGuard guard(hook);
    const autograd::SavedTensorHooks hooks{[&](const Tensor& s) { return ++packed, s; },
                                           [](const Tensor& s) { return s; }};
    return exp(t);
  };
  const Tensor x = leaf({1, 2});
  const Tensor y = rerun(f, x) * x;
  y.sum().backward();
  CHECK(hook.seen == 1);
  CHECK(packed == 1);
  exp(x);
  CHECK(hook.seen == 1);
  CHECK(packed == 1);

  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < 50; ++k) {
        const Tensor mine = leaf({0.5, 1}), w = leaf({2, 3});
        const F g = [&](const Tensor& t) { return t * w * t; };
        rerun(g, rerun(g, mine)).sum().backward();
        // w (w t^2)^2 = w^3 t^4
        right += values(mine.grad()) == V{8 * 4 * 0.125, 27 * 4.0} &&
                 values(w.grad()) == V{3 * 4 * 0.0625, 27};
      }
    });
  for (std::thread& t : threads) t.join();
  CHECK(right == 200);
}

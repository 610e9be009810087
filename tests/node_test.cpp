// What stands around the walk: hooks on tensors, watchers of leaves, slots for first gradients. DDP
// is built from these alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using autograd::grad;
using doctest::Contains;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

/// Writes down what it is told, in one log for all watchers.
struct Watcher : BackwardWatcher {
  std::string name;
  std::vector<std::string>& log;
  bool throw_at_start = false, throw_at_end = false;
  Watcher(std::string name, std::vector<std::string>& log) : name(std::move(name)), log(log) {}
  void backward_starts(std::span<Leaf* const> reached) override {
    if (throw_at_start) throw std::runtime_error("start");
    log.push_back(name + " starts with " + std::to_string(reached.size()));
    for (const Leaf* leaf : reached) CHECK(leaf->watcher == this);
  }
  void leaf_ready(Leaf& leaf) override {
    CHECK(leaf.gradient.defined());
    log.push_back(name + " leaf " + std::to_string(leaf.watcher_index));
  }
  void backward_ends(bool failed) override {
    log.push_back(name + (failed ? " failed" : " ends"));
    if (throw_at_end && !failed) throw std::runtime_error("end");
  }
};
void watch(const Tensor& t, BackwardWatcher& w, int index) {
  t.leaf()->watcher = &w;
  t.leaf()->watcher_index = index;
}

}  // namespace

// ---- hooks ----

TEST_CASE("a tensor hook sees the complete gradient, and what it returns takes its place") {
  const Tensor x = leaf({1, 2});
  const Tensor h = x * 2.0;
  int calls = 0;
  h.register_hook([&](const Tensor& g) {
    ++calls;
    CHECK(values(g) == V{4, 4});  // from both uses
    return g * 10.0;
  });
  (h + h * 3.0).sum().backward();
  CHECK(calls == 1);
  CHECK(values(x.grad()) == V{80, 80});
}

TEST_CASE("hooks run in the order they were registered, each on the result of the one before") {
  const Tensor x = leaf({1});
  x.register_hook([](const Tensor& g) { return g + 1.0; });
  x.register_hook([](const Tensor& g) { return g * 10.0; });
  x.register_hook([](const Tensor& g) {
    CHECK(values(g) == V{20});
    return Tensor();  // leaves it as it is
  });
  x.sum().backward();
  CHECK(values(x.grad()) == V{20});
}

TEST_CASE("what a hook returns stays the hook's: later gradients are not added into it") {
  const Tensor x = leaf({1, 2}), mine = tensor(V{5, 6});
  x.register_hook([&](const Tensor&) { return mine; });
  (x * 2.0 + x).sum().backward();
  (x * 2.0 + x).sum().backward();
  CHECK(values(x.grad()) == V{10, 12});
  CHECK(values(mine) == V{5, 6});
}

TEST_CASE("of the nodes that are ready, the one made last runs first") {
  const Tensor x = leaf({1});
  const Tensor a = x * 2.0, b = x * 3.0, c = x * 4.0;
  std::string order;
  c.register_hook([&](const Tensor&) { return order += 'c', Tensor(); });
  a.register_hook([&](const Tensor&) { return order += 'a', Tensor(); });
  b.register_hook([&](const Tensor&) { return order += 'b', Tensor(); });
  (b + a + c).sum().backward();
  CHECK(order == "cba");
}

TEST_CASE("a removed hook is silent; removing twice, or after the tensor is gone, is harmless") {
  Tensor x = leaf({1});
  int calls = 0;
  HookHandle first = x.register_hook([&](const Tensor&) { return ++calls, Tensor(); });
  HookHandle copy = first;
  HookHandle post = x.register_post_accumulate_grad_hook([&](const Tensor&) { ++calls; });
  x.sum().backward();
  CHECK(calls == 2);
  copy.remove();
  first.remove();
  post.remove();
  x.sum().backward();
  CHECK(calls == 2);
  HookHandle late = x.register_hook([](const Tensor& g) { return g; });
  HookHandle late_post = x.register_post_accumulate_grad_hook([](const Tensor&) {});
  x = Tensor();
  late.remove();
  late_post.remove();
  HookHandle().remove();
}

TEST_CASE("a hook may remove itself, and register others, while it runs") {
  const Tensor x = leaf({1});
  HookHandle handle;
  int calls = 0;
  handle = x.register_hook([&](const Tensor&) {
    ++calls;
    handle.remove();
    x.register_hook([&](const Tensor&) { return calls += 10, Tensor(); });
    return Tensor();
  });
  x.sum().backward();
  CHECK(calls == 1);
  x.sum().backward();
  CHECK(calls == 11);
}

TEST_CASE("a hook's result must fit, and its exception reaches the caller") {
  const Tensor x = leaf({1, 2});
  HookHandle wrong = x.register_hook([](const Tensor&) { return ones({3}); });
  CHECK_THROWS_WITH_AS(x.sum().backward(), Contains("[3]"), ShapeError);
  wrong.remove();
  x.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("from the hook"); });
  CHECK_THROWS_WITH_AS(x.sum().backward(), "from the hook", std::runtime_error);
  CHECK_FALSE(x.grad().defined());
  CHECK_THROWS_AS(ones({1}).register_hook([](const Tensor& g) { return g; }), AutogradError);
}

TEST_CASE("post-accumulate hooks see the tensor with its gradient, once per backward") {
  const Tensor x = leaf({1, 2});
  std::vector<double> seen;
  x.register_post_accumulate_grad_hook([&](const Tensor& t) {
    CHECK(t.is_same(x));
    seen.push_back(t.grad().sum().item<double>());
  });
  x.register_post_accumulate_grad_hook(
      [&](const Tensor& t) { t.set_grad({}); });  // "optimizer in backward"
  (x * 2.0 + x * 3.0).sum().backward();
  (x * 2.0).sum().backward();
  CHECK(seen == V{10, 4});
  CHECK_FALSE(x.grad().defined());
  CHECK_THROWS_AS((x * 2.0).register_post_accumulate_grad_hook([](const Tensor&) {}),
                  AutogradError);
}

TEST_CASE("grad() runs tensor hooks and no post-accumulate hooks") {
  const Tensor x = leaf({1});
  int tensor_hooks = 0, post_hooks = 0;
  x.register_hook([&](const Tensor& g) { return ++tensor_hooks, g * 2.0; });
  x.register_post_accumulate_grad_hook([&](const Tensor&) { ++post_hooks; });
  CHECK(values(grad({x.sum()}, {x})[0]) == V{2});
  CHECK(tensor_hooks == 1);
  CHECK(post_hooks == 0);
}

TEST_CASE("hooks of a frozen leaf wait, and can be removed meanwhile") {
  Tensor x = leaf({1});
  std::string log;
  auto note = [&log](char c) { return [&log, c](const Tensor&) { return log += c, Tensor(); }; };
  auto note_post = [&log](char c) { return [&log, c](const Tensor&) { log += c; }; };
  x.register_hook(note('a'));
  HookHandle b = x.register_hook(note('b'));
  x.register_post_accumulate_grad_hook(note_post('c'));
  HookHandle d = x.register_post_accumulate_grad_hook(note_post('d'));
  const Tensor y = x * 2.0;
  y.backward({}, {.retain_graph = true});
  CHECK(log == "abcd");
  x.requires_grad_(false);
  y.backward();
  CHECK(log == "abcd");
  CHECK_THROWS_AS(x.register_hook(note('e')), AutogradError);
  CHECK_THROWS_AS(x.register_post_accumulate_grad_hook(note_post('e')), AutogradError);
  b.remove();
  d.remove();
  x.requires_grad_();
  (x * 2.0).backward();
  CHECK(log == "abcdac");
}

// ---- watchers ----

TEST_CASE(
    "a watcher hears of the reached leaves before any node runs, and of the end after the last") {
  std::vector<std::string> log;
  Watcher w{"w", log};
  const Tensor a = leaf({1}), b = leaf({2}), unused = leaf({3}), unwatched = leaf({4});
  watch(a, w, 0);
  watch(b, w, 1);
  watch(unused, w, 2);
  b.register_post_accumulate_grad_hook([&](const Tensor&) { log.push_back("hook of b"); });
  const Tensor y = a * 2.0 + b * unwatched;
  y.register_hook([&](const Tensor&) { return log.push_back("first node"), Tensor(); });
  y.sum().backward();
  REQUIRE(log.size() == 6);
  CHECK(log[0] == "w starts with 2");
  CHECK(log[1] == "first node");
  CHECK(log.back() == "w ends");
  const auto at = [&](const char* s) { return std::find(log.begin(), log.end(), s); };
  CHECK(at("w leaf 0") < log.end());
  CHECK(at("hook of b") < at("w leaf 1"));
  CHECK(at("w leaf 1") < log.end());
}

TEST_CASE(
    "a watcher hears nothing of backwards that reach none of its leaves, and nothing of grad()") {
  std::vector<std::string> log;
  Watcher w{"w", log};
  const Tensor a = leaf({1}), b = leaf({2});
  watch(a, w, 0);
  b.sum().backward();
  grad({(a * b).sum()}, {a});
  CHECK(log.empty());
}

TEST_CASE("a watcher hears nothing of a frozen leaf") {
  std::vector<std::string> log;
  Watcher w{"w", log};
  Tensor a = leaf({1}), b = leaf({2});
  watch(a, w, 0);
  watch(b, w, 1);
  const Tensor earlier = a * b, of_b = b * 2.0;
  b.requires_grad_(false);
  earlier.backward();
  CHECK(log == std::vector<std::string>{"w starts with 1", "w leaf 0", "w ends"});
  of_b.backward();
  CHECK(log.size() == 3);
  b.requires_grad_();
  (a * b).backward();
  CHECK(log.size() == 7);
  CHECK(log[3] == "w starts with 2");
}

TEST_CASE("each watcher hears of its own leaves, and all of a failure") {
  std::vector<std::string> log;
  Watcher first{"first", log}, second{"second", log};
  const Tensor a = leaf({1}), b = leaf({2});
  watch(a, first, 0);
  watch(b, second, 0);
  const Tensor h = a * b;
  int failures = 1;
  h.register_hook([&](const Tensor&) -> Tensor {
    if (failures-- > 0) throw std::runtime_error("node");
    return {};
  });
  const auto has = [&](const char* s) { return std::count(log.begin(), log.end(), s); };
  CHECK_THROWS_WITH_AS(h.sum().backward(), "node", std::runtime_error);
  CHECK(has("first failed") == 1);
  CHECK(has("second failed") == 1);
  CHECK(has("first ends") + has("second ends") == 0);
  log.clear();
  h.sum().backward();
  CHECK(has("first starts with 1") == 1);
  CHECK(has("second starts with 1") == 1);
  CHECK(has("first ends") == 1);
  CHECK(has("second ends") == 1);
}

TEST_CASE("a watcher that throws at the start or at the end stops nobody from hearing the end") {
  std::vector<std::string> log;
  Watcher first{"first", log}, second{"second", log};
  const Tensor a = leaf({1}), b = leaf({2});
  watch(a, first, 0);
  watch(b, second, 0);
  SUBCASE("at the start: those told of it hear of the failure, and no node runs") {
    first.throw_at_start = true;
    CHECK_THROWS_WITH_AS((a * b).sum().backward(), "start", std::runtime_error);
    CHECK_FALSE(a.grad().defined());
    CHECK_FALSE(b.grad().defined());
    const auto starts = std::count(log.begin(), log.end(), "second starts with 1");
    CHECK(std::count(log.begin(), log.end(), "second failed") == starts);
  }
  SUBCASE("at the end") {
    first.throw_at_end = true;
    CHECK_THROWS_WITH_AS((a * b).sum().backward(), "end", std::runtime_error);
    const auto ends = std::count(log.begin(), log.end(), "second ends") +
                      std::count(log.begin(), log.end(), "second failed");
    CHECK(ends == 1);
  }
}

// ---- slots ----

TEST_CASE("the first gradient lands in the slot, whoever makes it") {
  Tensor bucket = full({4}, 99, {.dtype = DType::f64});
  const Tensor w = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_(),
               x = tensor(V{1, 1, 2, 0}, {2, 2});
  w.leaf()->slot = bucket.view({2, 2});
  V want;
  SUBCASE("a product writes it in place") {
    matmul(x, w).sum().backward();
    want = {3, 3, 1, 1};
  }
  SUBCASE("a linear layer does") {
    linear(x, w).sum().backward();
    want = {3, 1, 3, 1};
  }
  SUBCASE("any other op's result is copied") {
    (w * x).sum().backward();
    want = {1, 1, 2, 0};
  }
  SUBCASE("several contributions are summed") {
    (matmul(x, w) + matmul(x, w) * 2.0 + w * 10.0).sum().backward();
    want = {19, 19, 13, 13};
  }
  SUBCASE("a hook's replacement is copied") {
    w.register_hook([](const Tensor& g) { return g * 2.0; });
    matmul(x, w).sum().backward();
    want = {6, 6, 2, 2};
  }
  CHECK(values(bucket) == want);
  CHECK(values(w.grad()) == want);
  CHECK(w.grad().data_ptr() == bucket.data_ptr());
}

TEST_CASE("a second backward adds to the slot; after clearing, the next overwrites it") {
  Tensor slot = zeros({2, 2}, {.dtype = DType::f64});
  const Tensor w = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_(),
               x = tensor(V{1, 1, 2, 0}, {2, 2});
  w.leaf()->slot = slot;
  matmul(x, w).sum().backward();
  matmul(x, w).sum().backward();
  CHECK(values(slot) == V{6, 6, 2, 2});
  w.set_grad({});
  CHECK_FALSE(w.grad().defined());
  slot.fill_(-1);
  matmul(x, w).sum().backward();
  CHECK(values(slot) == V{3, 3, 1, 1});
}

TEST_CASE("a gradient assigned by the user moves into the slot with the next backward") {
  Tensor slot = zeros({2}, {.dtype = DType::f64});
  const Tensor w = leaf({1, 2}), mine = tensor(V{100, 200});
  w.leaf()->slot = slot;
  w.set_grad(mine);
  CHECK(w.grad().is_same(mine));
  (w * 3.0).sum().backward();
  CHECK(values(slot) == V{103, 203});
  CHECK(w.grad().data_ptr() == slot.data_ptr());
  CHECK(values(mine) == V{100, 200});
}

TEST_CASE("nobody writes to the slot of a frozen leaf") {
  Tensor slot = full({1, 1, 2, 2}, 7, {.dtype = DType::f64});
  const Tensor x = tensor(V{1, 1, 2, 0}, {1, 1, 2, 2}), bias = leaf({5});
  Tensor w = tensor(V{1, 2, 3, 4}, {1, 1, 2, 2}).requires_grad_();
  w.leaf()->slot = slot;
  const Tensor y = conv2d(x, w, bias);  // makes both gradients in one pass
  w.requires_grad_(false);
  y.backward();
  CHECK(values(bias.grad()) == V{1});
  CHECK(values(slot) == V{7, 7, 7, 7});
  CHECK_FALSE(w.grad().defined());
}

TEST_CASE("grad() and recorded backwards do not write the slot's bytes without need") {
  Tensor slot = full({2, 2}, 7, {.dtype = DType::f64});
  const Tensor w = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_(),
               x = tensor(V{1, 1, 2, 0}, {2, 2});
  w.leaf()->slot = slot;
  const Tensor g = grad({matmul(x, w).sum()}, {w})[0];
  CHECK(values(g) == V{3, 3, 1, 1});
  CHECK(values(slot) == V{7, 7, 7, 7});
  matmul(x, w * w).sum().backward({}, {.create_graph = true});
  CHECK(values(slot) == V{6, 12, 6, 8});
  w.set_grad({});
}

TEST_CASE("without a slot, an assigned gradient is added to") {
  const Tensor w = leaf({1, 2}), mine = tensor(V{100, 200});
  w.set_grad(mine);
  (w * 3.0).sum().backward();
  CHECK(values(w.grad()) == V{103, 203});
}

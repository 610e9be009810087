// OpHook: code around every op of a thread, and what an op says of itself before it runs.
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Names = std::vector<std::string>;
using Tensors = std::vector<Tensor>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

/// Writes down "NAME >" before and "NAME <" after each op in a log that hooks may share.
struct Logger : OpHook {
  std::string name;
  Names& log;
  std::vector<OpInfo> seen;
  Logger(std::string name, Names& log) : name(std::move(name)), log(log) {}
  Tensors around(const OpInfo& op, std::span<const Tensor>, const Run& run) override {
    seen.push_back(op);
    log.push_back(name + op.name + " >");
    Tensors results = run();
    log.push_back(name + op.name + " <");
    return results;
  }
};

/// Keeps the inputs, and reads them after the op.
struct Holder : OpHook {
  std::vector<V> before, after;
  Tensors around(const OpInfo&, std::span<const Tensor> inputs, const Run& run) override {
    for (const Tensor& x : inputs) before.push_back(values(x));
    Tensors results = run();
    for (const Tensor& x : inputs) after.push_back(values(x));
    return results;
  }
};

/// x^2 + 1, by two ops.
struct Composed {
  static constexpr const char* name = "composed";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) const { return x.square() + 1.0; }
  void backward(const Saved&, const Tensor&, InputGradients& dx) const { dx.none(0); }
};

/// Calls f(op, inputs, run).
template <class F>
struct Calls : OpHook {
  F f;
  explicit Calls(F f) : f(std::move(f)) {}
  Tensors around(const OpInfo& op, std::span<const Tensor> inputs, const Run& run) override {
    return f(op, inputs, run);
  }
};

}  // namespace

TEST_CASE("hooks see every op of their thread; the innermost is called first") {
  const Tensor x = leaf({1, 2});
  Names log;
  Logger a("a:", log), b("b:", log);
  {
    const OpHookGuard outer(a);
    Tensor y = relu(x * 2.0).view({2, 1});
    CHECK(log == Names{"a:mul >", "a:mul <", "a:relu >", "a:relu <", "a:view >", "a:view <"});
    log.clear();
    {
      const OpHookGuard inner(b);
      exp(x);
      CHECK(log == Names{"b:exp >", "a:exp >", "a:exp <", "b:exp <"});
      log.clear();
      std::thread([] { sigmoid(ones({2})); }).join();
      CHECK(log.empty());
    }
    cat({x, x});
    y.detach().mul_(2.0);
    CHECK(log == Names{"a:cat >", "a:cat <", "a:mul >", "a:mul <"});
    CHECK(a.seen.back().in_place);
    CHECK_FALSE(a.seen[0].in_place);
    CHECK(a.seen.back().type == a.seen[0].type);
    CHECK(a.seen[1].type != a.seen[0].type);
  }
  log.clear();
  exp(x);
  CHECK(log.empty());
}

TEST_CASE("the ops of a backward are seen too, and gradients are the same with a hook as without") {
  const auto gradient = [] {
    const Tensor x = leaf({1, 2, -3});
    Tensor h = relu(x * 3.0) * 1.0;
    h[0].mul_(5.0);
    stack({h, exp(h) * x}, 1).square().sum().backward();
    return values(x.grad());
  };
  const V without = gradient();
  Names log;
  Logger hook("", log);
  const OpHookGuard guard(hook);
  CHECK(gradient() == without);
  std::set<std::string> names;
  for (const OpInfo& op : hook.seen) names.insert(op.name);
  CHECK(names.count("slice_backward") + names.count("expand") >= 1);
}

TEST_CASE(
    "ops of which a forward is made belong to it, and a hook's own ops go to the outer hooks") {
  const Tensor x = leaf({1, 5, 2});
  Names log;
  Logger outer("", log);
  Calls inner([&](const OpInfo&, std::span<const Tensor> inputs, const OpHook::Run& run) {
    neg(inputs[0]);
    return run();
  });
  const OpHookGuard a(outer);
  {
    const OpHookGuard b(inner);
    CHECK(values(apply(Composed{}, x)) == V{2, 26, 5});
  }
  CHECK(log == Names{"neg >", "neg <", "composed >", "composed <"});
}

TEST_CASE("while a hook holds an input, the op does not take over its memory") {
  const V at{-1, 4};
  const auto run = [&](auto f) {  // on a tensor that nobody else holds
    Holder hook;
    const OpHookGuard guard(hook);
    const Tensor y = f(tensor(at) + 0.0);
    CHECK(hook.before == hook.after);
    return values(y);
  };
  CHECK(run([](Tensor x) { return relu(std::move(x)); }) == V{0, 4});
  CHECK(run([](Tensor x) { return sigmoid(std::move(x)); })[1] == doctest::Approx(0.98201379));
  CHECK(run([](Tensor x) { return std::move(x) * 2.0; }) == V{-2, 8});
  CHECK(run([](Tensor x) { return dropout(std::move(x), 0.5, true); }).size() == 2);
}

TEST_CASE("a hook may return results in an op's place") {
  const Tensor x = leaf({1, 2}), other = leaf({7, 8});
  int runs = 0;
  Calls hook([&](const OpInfo& op, std::span<const Tensor> inputs, const OpHook::Run& run) {
    if (std::string(op.name) == "exp") return Tensors{other};
    if (op.in_place && inputs.size() == 2) {
      CHECK(std::string(op.name) == "add");
      Tensor(inputs[0].detach()).copy_(inputs[1]);
      return Tensors{inputs[0]};
    }
    ++runs;
    return run();
  });
  const OpHookGuard guard(hook);
  const Tensor y = exp(x) * 3.0;
  CHECK(values(y) == V{21, 24});
  y.sum().backward();
  CHECK(values(other.grad()) == V{3, 3});
  CHECK_FALSE(x.grad().defined());
  CHECK(runs >= 2);
  Tensor z = tensor(V{1, 1});
  z.add_(tensor(V{5, 6}));
  CHECK(values(z) == V{5, 6});
}

TEST_CASE("what a hook returns must fit the op, which runs once") {
  const Tensor x = leaf({1, 2});
  Tensors result;
  Calls hook([&](const OpInfo&, std::span<const Tensor>, const OpHook::Run&) { return result; });
  {
    const OpHookGuard guard(hook);
    CHECK_THROWS_WITH_AS(exp(x), Contains("exp: an OpHook returned 0 results, and the op has 1"),
                         Error);
    result = {Tensor()};
    CHECK_THROWS_WITH_AS(exp(x), Contains("exp: an OpHook returned an undefined tensor"), Error);
    result = {tensor(V{1})};
    Tensor z = tensor(V{1});
    CHECK_THROWS_WITH_AS(z.fill_(2), Contains("fill_: an OpHook returned another tensor"), Error);
  }
  Calls twice([&](const OpInfo&, std::span<const Tensor>, const OpHook::Run& run) {
    run();
    return run();
  });
  const OpHookGuard guard(twice);
  CHECK_THROWS_WITH_AS(exp(x), Contains("exp: an OpHook called run() twice"), Error);
}

TEST_CASE("errors of ops and hooks pass through, and the hooks stand as before") {
  const Tensor x = leaf({1, 2});
  Names log;
  Logger outer("o:", log), inner("i:", log);
  bool fails = false;
  Calls between([&](const OpInfo&, std::span<const Tensor>, const OpHook::Run& run) {
    if (fails) throw std::runtime_error("from the hook");
    return run();
  });
  const OpHookGuard a(outer), b(between), c(inner);
  CHECK_THROWS_AS(matmul(ones({2, 3}), ones({2, 3})), ShapeError);
  CHECK(log.back() == "o:matmul >");
  fails = true;
  CHECK_THROWS_WITH_AS(exp(x), "from the hook", std::runtime_error);
  CHECK(log.back() == "i:exp >");
  fails = false;
  log.clear();
  exp(x);
  CHECK(log == Names{"i:exp >", "o:exp >", "o:exp <", "i:exp <"});
}

TEST_CASE("views that ran inside a hook are views: a change in place reaches the base's gradient") {
  Names log;
  Logger hook("", log);
  const OpHookGuard guard(hook);
  const Tensor x = leaf({1, 2, 3, 4});
  Tensor h = x * 1.0;
  h.view({2, 2})[0].mul_(10.0);
  h.sum().backward();
  CHECK(values(x.grad()) == V{10, 10, 1, 1});
}

// ---- what automatic mixed precision will do with each op ----

TEST_CASE("the precision of every op is the documented one") {
  const std::map<Precision, std::set<std::string>> documented{
      {Precision::lower, {"linear", "matmul", "conv2d"}},
      {Precision::full,
       {"exp", "log", "pow", "softmax", "log_softmax", "cross_entropy", "layer_norm", "sum", "norm",
        "var"}},
      {Precision::widest, {"cat", "stack", "where"}}};
  std::set<std::string> named, loaded;
  for (const OpInfo& op : op_infos()) {
    Precision expected = Precision::given;
    for (const auto& [precision, ops] : documented)
      if (ops.count(op.name)) expected = precision;
    loaded.insert(op.name);
    INFO(op.name, " is ", str_cat(op.precision));
    CHECK(op.precision == expected);
  }
  for (const auto& [precision, ops] : documented) named.insert(ops.begin(), ops.end());
  for (const std::string& name : named) CHECK_MESSAGE(loaded.count(name) == 1, name);
  CHECK(loaded.size() > 50);

  const Tensor x = ones({2, 2});
  Names log;
  Logger hook("", log);
  const OpHookGuard guard(hook);
  matmul(x, x);
  x.mean();
  x.sum();
  CHECK(hook.seen[0].precision == Precision::lower);
  CHECK(hook.seen[1].precision == Precision::given);
  CHECK(hook.seen[2].precision == Precision::full);
}

// autograd::Function, a program's own differentiable function; and retain_grad().
#include <doctest/doctest.h>

#include <any>
#include <array>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include <lockstep/autograd/function.h>
#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/device_backend.h>
#include <lockstep/tensor/ops.h>

using namespace lockstep;
using autograd::AutogradContext;
using autograd::grad;
using autograd::gradcheck;
using autograd::gradgradcheck;
using autograd::variable_list;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Inputs = const std::vector<Tensor>&;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

/// factor * exp(x) * w, saving an input and an intermediate output.
struct ExpTimes : autograd::Function<ExpTimes> {
  static Tensor forward(AutogradContext* ctx, Tensor x, double factor, const Tensor& w) {
    CHECK_FALSE(is_grad_enabled());
    const Tensor y = exp(x) * w * factor;
    ctx->save_for_backward({y, w, x});
    ctx->saved_data["factor"] = factor;
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const double factor = std::any_cast<double>(ctx->saved_data["factor"]);
    Tensor dw;
    if (ctx->needs_input_grad(2)) dw = grads[0] * exp(saved[2]) * factor;
    CHECK_FALSE(ctx->needs_input_grad(1));
    return {grads[0] * saved[0], Tensor(), dw};
  }
};

/// (sum, product) of a list and a number; an array of two results.
struct SumAndProduct : autograd::Function<SumAndProduct> {
  static constexpr const char* name = "sum_and_product";
  static inline bool materialize = true;
  static inline std::vector<bool> arrived;
  static std::array<Tensor, 2> forward(AutogradContext* ctx, const variable_list& list, int scale) {
    ctx->set_materialize_grads(materialize);
    ctx->saved_data["scale"] = scale;
    ctx->save_for_backward(list);
    return {(list[0] + list[1]) * scale, list[0] * list[1] * scale};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    arrived = {grads[0].defined(), grads[1].defined()};
    const auto x = ctx->get_saved_variables();
    const int scale = std::any_cast<int>(ctx->saved_data["scale"]);
    Tensor sum = zeros_like(x[0]);
    if (grads[0].defined()) sum = sum + grads[0] * scale;
    Tensor product = zeros_like(x[0]);
    if (grads[1].defined()) product = grads[1] * scale;
    return {sum + product * x[1], sum + product * x[0], Tensor()};
  }
};

/// Sorts two numbers; their order has no gradient, although it is floating.
struct SortTwo : autograd::Function<SortTwo> {
  static std::tuple<Tensor, Tensor> forward(AutogradContext* ctx, const Tensor& x) {
    const bool swap = values(x)[0] > values(x)[1];
    const Tensor order = tensor(swap ? V{1, 0} : V{0, 1});
    ctx->mark_non_differentiable({order});
    ctx->saved_data["swap"] = swap;
    return {swap ? stack({x[1], x[0]}) : x.clone(), order};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    CHECK(values(grads[1]) == V{0, 0});
    const Tensor& g = grads[0];
    return {std::any_cast<bool>(ctx->saved_data["swap"]) ? stack({g[1], g[0]}) : g};
  }
};

/// x + bias, where backward leaves the sum over rows to the caller.
struct AddRow : autograd::Function<AddRow> {
  static Tensor forward(AutogradContext*, const Tensor& x, const Tensor& bias) { return x + bias; }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], grads[0]};
  }
};

/// Returns these gradients, whatever arrives.
struct Returns : autograd::Function<Returns> {
  static inline variable_list result;
  static inline Tensor constant;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int) {
    if (constant.defined()) ctx->mark_non_differentiable({constant});
    return x * 1.0;
  }
  static variable_list backward(AutogradContext*, variable_list) { return result; }
};

/// Returns its input, with a gradient of its own.
struct Reverse : autograd::Function<Reverse> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x; }
  static variable_list backward(AutogradContext*, variable_list grads) { return {neg(grads[0])}; }
};

}  // namespace

TEST_CASE(
    "a Function is an op: derivatives of first and second order, names, no graph without need") {
  const Tensor x = leaf({0.2, -0.7}), w = leaf({1.5, 2});
  const Tensor y = ExpTimes::apply(x, 3.0, w);
  CHECK(std::string(y.node()->name()) == "ExpTimes");
  CHECK(values(y)[1] == doctest::Approx(3 * std::exp(-0.7) * 2));
  const auto f = [](Inputs in) { return ExpTimes::apply(in[0], 3.0, in[1]); };
  CHECK_NOTHROW(gradcheck(f, {x, w}));
  CHECK_NOTHROW(gradgradcheck(f, {x, w}));
  CHECK_NOTHROW(gradgradcheck(f, {x, w.detach()}));
  CHECK_FALSE(ExpTimes::apply(x.detach(), 3.0, w.detach()).requires_grad());
  NoGradGuard off;
  CHECK_FALSE(ExpTimes::apply(x, 3.0, w).requires_grad());
}

TEST_CASE("what a Function saves is checked for changes in place, and goes with the graph") {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  Tensor y = ExpTimes::apply(x, 2.0, w);
  y.sum().backward({}, {.retain_graph = true});
  y.sum().backward();
  CHECK_THROWS_WITH_AS(y.sum().backward(), Contains("backward of ExpTimes: its saved tensors were"),
                       AutogradError);
  y = ExpTimes::apply(x, 2.0, w);
  y.mul_(2.0);
  CHECK_THROWS_WITH_AS(y.sum().backward(), Contains("backward of ExpTimes: a tensor of shape [2]"),
                       AutogradError);
}

TEST_CASE("two outputs, a list among the arguments, gradients that are zeros or undefined") {
  const auto f = [](Inputs in) {
    const auto [s, p] = SumAndProduct::apply(in, 2);
    return s * p + s;
  };
  CHECK_NOTHROW(gradcheck(f, {leaf({1, 2}), leaf({3, -1})}));
  CHECK_NOTHROW(gradgradcheck(f, {leaf({1, 2}), leaf({3, -1})}));
  const Tensor a = leaf({1, 2}), b = leaf({3, 4});
  for (bool materialize : {true, false}) {
    SumAndProduct::materialize = materialize;
    a.set_grad({});
    const auto [s, p] = SumAndProduct::apply(variable_list{a, b}, 2);
    CHECK(s.node() == p.node());
    p.sum().backward();
    CHECK(SumAndProduct::arrived == std::vector<bool>{materialize, true});
    CHECK(values(a.grad()) == V{6, 8});
  }
  SumAndProduct::materialize = true;
}

TEST_CASE("an output that is marked has no gradient, and the others do") {
  const Tensor x = leaf({5, 3});
  const auto [sorted, order] = SortTwo::apply(x);
  CHECK(values(sorted) == V{3, 5});
  CHECK(sorted.requires_grad());
  CHECK_FALSE(order.requires_grad());
  (sorted * tensor(V{10, 1}) + order).sum().backward();
  CHECK(values(x.grad()) == V{1, 10});
}

TEST_CASE("gradients are summed to the input's shape and converted to its dtype") {
  const Tensor x = ones({3, 2}, {.dtype = DType::f64}).requires_grad_(), bias = leaf({1, 2});
  AddRow::apply(x, bias).sum().backward();
  CHECK(values(bias.grad()) == V{3, 3});
  CHECK(x.grad().shape() == Shape{3, 2});
  const Tensor narrow = ones({2}).requires_grad_();
  Returns::result = {tensor(V{0.5, 0.25}), Tensor()};
  Returns::apply(narrow, 1).sum().backward();
  CHECK(narrow.grad().dtype() == DType::f32);
  CHECK(values(narrow.grad()) == V{0.5, 0.25});
}

TEST_CASE("a Function may return its input") {
  const Tensor x = leaf({1, 2});
  const Tensor h = x * 1.0, y = Reverse::apply(h);
  CHECK(y.data_ptr() == h.data_ptr());
  (h.sum() * 3.0 + y.sum()).backward();
  CHECK(values(x.grad()) == V{2, 2});
}

TEST_CASE("what backward returns must fit the arguments; undefined is zero") {
  const Tensor x = leaf({1, 2});
  const auto run = [&](variable_list result) {
    Returns::result = std::move(result);
    (Returns::apply(x, 1) + x).sum().backward();
  };
  CHECK_THROWS_WITH_AS(run({x}),
                       Contains("backward of Returns: it returned 1 gradients, and its "
                                "forward has 2 arguments"),
                       AutogradError);
  CHECK_THROWS_WITH_AS(run({x, x}), Contains("a gradient for argument 1, which is no tensor"),
                       AutogradError);
  CHECK_THROWS_AS(run({ones({3}, {.dtype = DType::f64}), Tensor()}), ShapeError);
  x.set_grad({});
  run({Tensor(), Tensor()});
  CHECK(values(x.grad()) == V{1, 1});
  Returns::constant = x;
  CHECK_THROWS_WITH_AS(Returns::apply(x * 1.0, 1), Contains("Returns: mark_non_differentiable"),
                       ValueError);
  Returns::constant = Tensor();
}

TEST_CASE("hooks around ops and saved-tensor hooks see a Function as one op") {
  struct Names : OpHook {
    std::vector<std::string> names;
    std::vector<Tensor> around(const OpInfo& op, std::span<const Tensor>, const Run& run) override {
      names.emplace_back(op.name);
      return run();
    }
  } hook;
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  const OpHookGuard guard(hook);
  int packed = 0;
  const autograd::SavedTensorHooks saved{[&](const Tensor& t) {
                                           ++packed;
                                           return t.clone();
                                         },
                                         [](const Tensor& t) { return t; }};
  Tensor y = ExpTimes::apply(x, 1.0, w);
  CHECK(hook.names == std::vector<std::string>{"ExpTimes"});
  CHECK(packed == 3);
  y.add_(1.0);  // what was packed is not changed
  y.sum().backward();
  CHECK(values(x.grad())[0] == doctest::Approx(3 * std::exp(1.0)));
}

// ---- retain_grad ----

TEST_CASE("retain_grad: a tensor that an op made has its gradient too, added up") {
  const Tensor x = leaf({1, 2});
  const Tensor h = x * 3.0;
  CHECK_FALSE(h.retains_grad());
  h.retain_grad();
  h.retain_grad();
  CHECK(h.retains_grad());
  CHECK_FALSE(h.is_leaf());
  CHECK_FALSE(h.grad().defined());
  int seen = 0;
  h.register_hook([&](const Tensor& g) { return ++seen, g * 10.0; });  // before it is retained
  (h * h).sum().backward({}, {.retain_graph = true});
  CHECK(values(h.grad()) == V{60, 120});
  CHECK(values(x.grad()) == V{180, 360});
  const Tensor kept = h.grad();
  h.sum().backward();
  CHECK(values(h.grad()) == V{70, 130});
  CHECK(values(kept) == V{60, 120});
  CHECK(seen == 2);
  h.set_grad({});
  CHECK_FALSE(h.grad().defined());
  CHECK(x.retains_grad() == false);
  x.retain_grad();  // a leaf does so anyway
  CHECK_THROWS_WITH_AS(tensor(V{1}).retain_grad(), Contains("does not require grad"),
                       AutogradError);
  CHECK_THROWS_WITH_AS((x * 2.0).set_grad(x), Contains("retain_grad()"), AutogradError);
}

TEST_CASE("retain_grad keeps a copy: what follows in backward does not change it") {
  const Tensor x = leaf({1, 2});
  const Tensor z = x * 1.0, h = z.view({2, 1});
  h.retain_grad();
  z.register_hook([&](const Tensor&) { return h.grad().mul_(100.0), Tensor(); });
  relu(h).sum().backward();
  CHECK(values(x.grad()) == V{1, 1});  // nor the other way round
  x.grad().mul_(7.0);
  CHECK(values(h.grad()) == V{100, 100});
}

TEST_CASE("retain_grad of views and of each of several outputs") {
  const Tensor x = tensor(V{1, 2, 3, 4}, {2, 2}).requires_grad_();
  const Tensor h = x * 2.0, row = h[0], t = h.t();
  for (const Tensor* y : {&h, &row, &t}) y->retain_grad();
  (row.square().sum() + t.sum() + h.sum()).backward();
  CHECK(values(row.grad()) == V{4, 8});
  CHECK(values(t.grad()) == V{1, 1, 1, 1});
  CHECK(values(h.grad()) == V{6, 10, 2, 2});
  const auto [s, p] = SumAndProduct::apply(variable_list{leaf({1, 2}), leaf({3, 4})}, 1);
  p.retain_grad();
  (s * 5.0 + p * 7.0).sum().backward();
  CHECK(values(p.grad()) == V{7, 7});
  CHECK_FALSE(s.grad().defined());
}

TEST_CASE("after an op in place the retained gradient is that of the new values") {
  const Tensor x = leaf({1, 2});
  Tensor h = x * 2.0;
  h.retain_grad();
  h.mul_(5.0);
  h.square().sum().backward();  // d/dh of h^2 is 2h
  CHECK(values(h.grad()) == V{20, 40});
  CHECK(values(x.grad()) == V{200, 400});

  Tensor base = x * 1.0;
  const Tensor view = base.narrow(0, 0, 1), other = base.narrow(0, 0, 2);
  base.retain_grad();
  view.retain_grad();
  other.retain_grad();
  Tensor(view).mul_(10.0);
  CHECK(values(other) == V{10, 2});
  (base.sum() + view.sum() * 3.0 + (other * other).sum()).backward();
  CHECK(values(base.grad()) == V{24, 5});  // what comes through the views too
  CHECK(values(view.grad()) == V{3});
  CHECK(values(other.grad()) == V{20, 4});
}

TEST_CASE("what differentiates itself or retains gradients leaves no memory behind") {
  const auto run = [] {
    const Tensor x = leaf({1, 2}), w = leaf({3, 4});
    const Tensor h = x * x;
    h.retain_grad();
    const auto [s, p] = SumAndProduct::apply(variable_list{h, w}, 2);
    p.retain_grad();
    const Tensor y = ExpTimes::apply(s * p * 0.01, 1.0, w);
    y.sum().backward({}, {.create_graph = true});
    (h.grad() * p.grad() * x.grad()).sum().backward({}, {.create_graph = true});
  };
  run();
  const int64_t before = memory_stats().active_bytes;
  run();
  CHECK(memory_stats().active_bytes == before);
}

TEST_CASE("retained gradients with create_graph, with grad(), and of tensors that are gone") {
  const Tensor x = leaf({1, 2});
  {
    const Tensor h = x * x;
    h.retain_grad();
    (h * h).sum().backward({}, {.create_graph = true});
    CHECK(h.grad().requires_grad());
    x.set_grad({});
    h.grad().sum().backward();  // 2 x^2
    CHECK(values(x.grad()) == V{4, 8});
  }
  Tensor y;
  {
    const Tensor h = x * 2.0;
    h.retain_grad();
    y = h.sum();
  }
  CHECK_NOTHROW(y.backward());
  const Tensor h = x * 2.0;
  h.retain_grad();
  grad({(h * 3.0).sum()}, {x});
  CHECK(values(h.grad()) == V{3, 3});
}

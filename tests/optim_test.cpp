// Optimizers: PyTorch's trajectories, every layout of memory, state that is saved and loaded, and
// refusals.
#include <doctest/doctest.h>

#include <lockstep/nn/init.h>
#include <lockstep/nn/linear.h>
#include <lockstep/optim/optim.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

#include "golden.h"
#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;

namespace {

constexpr int kSteps = 12;

const Golden& golden() {
  static const Golden g("optim.safetensors");
  return g;
}

/// A golden tensor laid out in memory as `variant` says: the values must not depend on it.
enum class Layout { contiguous, transposed, gappy };
Tensor laid_out(const Tensor& values, Layout layout) {
  if (layout == Layout::contiguous) return values.clone();
  if (layout == Layout::transposed) {
    Shape order;
    for (int i = values.dim() - 1; i >= 0; --i) order.push_back(i);
    return values.clone().permute(order).contiguous().permute(order);
  }
  Shape wide = values.shape();
  wide[values.dim() - 1] *= 2;
  Tensor t = zeros(wide, {.dtype = values.dtype()}).slice(-1, {.step = 2});
  t.copy_(values);
  return t;
}

std::vector<Tensor> start(DType dtype, Layout layout) {
  std::vector<Tensor> params;
  for (int i = 0; i < 3; ++i)
    params.push_back(
        laid_out(golden()["start." + std::to_string(i)].to(dtype), layout).requires_grad_());
  return params;
}
void set_gradients(const std::vector<Tensor>& params, int step, Layout layout) {
  for (int i = 0; i < 3; ++i) {
    const Tensor g =
        golden()["grad." + std::to_string(step) + "." + std::to_string(i)].to(params[0].dtype());
    params[static_cast<size_t>(i)].set_grad(step == 3 && i == 1 ? Tensor() : laid_out(g, layout));
  }
}

/// Runs the case of that name in make_optim.py; `make` builds the optimizer from the parameters.
template <class Make>
void check(const std::string& name, Make make) {
  for (const DType dtype : {DType::f64, DType::f32})
    for (const Layout layout : {Layout::contiguous, Layout::transposed, Layout::gappy})
      for (const Layout gradients : {Layout::contiguous, layout}) {
        CAPTURE(name);
        CAPTURE(static_cast<int>(layout));
        const auto params = start(dtype, layout);
        auto opt = make(params);
        for (int step = 0; step < kSteps; ++step) {
          set_gradients(params, step, gradients);
          opt.step();
          const std::string key =
              name + (dtype == DType::f64 ? ".f64" : ".f32") + ".step" + std::to_string(step) + ".";
          if (!golden().has(key + "0")) continue;
          for (int i = 0; i < 3; ++i)
            CHECK(difference(params[static_cast<size_t>(i)], golden()[key + std::to_string(i)]) <=
                  (dtype == DType::f64 ? 1e-13 : 2e-6));
        }
      }
}

struct Holder : nn::Module {
  nn::Parameter p;
  Tensor forward(Tensor x) { return x; }
  LOCKSTEP_MODULE(Holder, p)
};

}  // namespace

TEST_CASE("step: trajectories equal PyTorch's") {
  using P = const std::vector<Tensor>&;
  check("sgd", [](P p) { return optim::SGD{p, {.lr = 0.1}}; });
  check("sgd_decay", [](P p) { return optim::SGD{p, {.lr = 0.1, .weight_decay = 0.05}}; });
  check("sgd_momentum", [](P p) {
    return optim::SGD{p, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}};
  });
  check("sgd_dampening", [](P p) {
    return optim::SGD{p, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3}};
  });
  check("sgd_nesterov", [](P p) {
    return optim::SGD{p, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}};
  });
  check("adam", [](P p) { return optim::Adam{p, {.lr = 0.05}}; });
  check("adam_decay", [](P p) {
    return optim::Adam{p, {.lr = 0.05, .betas = {0.8, 0.95}, .eps = 1e-3, .weight_decay = 0.1}};
  });
  check("adam_amsgrad", [](P p) {
    return optim::Adam{p, {.lr = 0.05, .betas = {0.5, 0.6}, .amsgrad = true}};
  });
  check("adamw", [](P p) { return optim::AdamW{p, {.lr = 0.05}}; });
  check("adamw_amsgrad", [](P p) {
    return optim::AdamW{p, {.lr = 0.05, .betas = {0.5, 0.6}, .weight_decay = 0.2, .amsgrad = true}};
  });
  check("adamw_groups", [](P p) {
    return optim::AdamW{{{.params = {p[0]}, .options = {.lr = 0.02, .weight_decay = 0.3}},
                         {.params = {p[1], p[2]}, .options = {.lr = 0.05, .weight_decay = 0}}}};
  });
}

TEST_CASE("step: many tensors of awkward sizes, on any number of threads, bitwise") {
  auto run = [](int threads) {
    set_num_threads(threads);
    manual_seed(3);
    std::vector<Tensor> params;
    for (int64_t n : {1, 0, 63, 64, 65, 20000, 3, 16384, 40001})
      params.push_back(randn({n}).requires_grad_());
    optim::AdamW opt{params, {.lr = 0.01}};
    for (int step = 0; step < 3; ++step) {
      for (Tensor& p : params) p.set_grad(randn(p.shape()));
      opt.step();
    }
    set_num_threads(1);
    return params;
  };
  const auto a = run(1), b = run(2);
  for (size_t i = 0; i < a.size(); ++i) CHECK(difference(a[i], b[i]) == 0);
  // Element by element the same as a tensor of its own would get.
  manual_seed(3);
  Tensor alone;
  for (int64_t n : {1, 0, 63, 64, 65, 20000, 3, 16384, 40001}) alone = randn({n});
  alone.requires_grad_();
  optim::AdamW opt{{alone}, {.lr = 0.01}};
  for (int step = 0; step < 3; ++step) {
    for (int64_t n : {1, 0, 63, 64, 65, 20000, 3, 16384}) randn({n});
    alone.set_grad(randn({40001}));
    opt.step();
  }
  CHECK(difference(a.back(), alone) == 0);
}

TEST_CASE("step: it bumps the version of what it changed, and a stale backward is noticed") {
  Tensor w = ones({3}).requires_grad_(), frozen = ones({3}).requires_grad_();
  optim::SGD opt{{w, frozen}, {.lr = 0.1}};
  const Tensor y = (w * w).sum();
  w.set_grad(ones({3}));
  const uint32_t before = w.storage().version(), other = frozen.storage().version();
  opt.step();
  CHECK(w.storage().version() > before);
  CHECK(frozen.storage().version() == other);
  CHECK(difference(frozen, ones({3})) == 0);
  CHECK_THROWS_AS(y.backward(), AutogradError);
}

TEST_CASE("zero_grad: to none, or to zeros in place") {
  Tensor w = ones({3}).requires_grad_();
  optim::SGD opt{{w}, {.lr = 0.1}};
  w.set_grad(ones({3}));
  const void* bytes = w.grad().data_ptr();
  opt.zero_grad(false);
  CHECK(w.grad().data_ptr() == bytes);
  CHECK(difference(w.grad(), zeros({3})) == 0);
  opt.zero_grad();
  CHECK(!w.grad().defined());
  opt.step();
  CHECK(difference(w, ones({3})) == 0);
}

TEST_CASE(
    "step: as in PyTorch a frozen parameter moves by the gradient it has, until that is cleared") {
  const TensorOptions f64{.dtype = DType::f64, .requires_grad = true};
  Tensor w = full({2}, 3, f64), v = full({2}, 3, f64);
  optim::SGD sgd{{w}, {.lr = 0.5, .momentum = 0.5}};
  optim::AdamW adamw{{v}, {.lr = 0.25, .weight_decay = 0.5}};
  for (Tensor& p : std::vector{w, v}) {
    (p * tensor<double>({4, -8})).sum().backward();
    p.requires_grad_(false);
  }
  sgd.step();
  CHECK(w.to_vector<double>() == std::vector<double>{1, 7});  // 3 - 0.5 * g
  sgd.step();
  CHECK(w.to_vector<double>() == std::vector<double>{-2, 13});  // 1 - 0.5 * 1.5 g
  adamw.step();  // 3 (1 - 0.25 * 0.5) - 0.25 g / (|g| + 1e-8)
  CHECK(v.to_vector<double>()[0] == doctest::Approx(2.375).epsilon(1e-7));
  CHECK(v.to_vector<double>()[1] == doctest::Approx(2.875).epsilon(1e-7));
  CHECK(optim::clip_grad_norm_({w}, 100).item<double>() == doctest::Approx(std::sqrt(80.0)));

  sgd.zero_grad(false);
  CHECK(w.grad().to_vector<double>() == std::vector<double>{0, 0});
  sgd.zero_grad();
  adamw.zero_grad();
  CHECK(!w.grad().defined());
  CHECK(!v.grad().defined());
  sgd.step();  // neither momentum nor decay moves what has no gradient
  CHECK(w.to_vector<double>() == std::vector<double>{-2, 13});
}

TEST_CASE("zero_grad(false) drops the graph of a gradient and keeps its memory") {
  Tensor w = full({2}, 3, {.dtype = DType::f64, .requires_grad = true});
  optim::SGD opt{{w}, {.lr = 0.1}};
  (w * w).sum().backward({}, {.create_graph = true});
  CHECK(w.grad().requires_grad());
  opt.zero_grad(false);
  CHECK(!w.grad().requires_grad());
  const void* memory = w.grad().data_ptr();
  CHECK(w.grad().to_vector<double>() == std::vector<double>{0, 0});
  (w * 2.0).sum().backward();
  opt.zero_grad(false);
  CHECK(w.grad().data_ptr() == memory);
}

TEST_CASE("state_dict: it goes through a file, and the run goes on as if it had not stopped") {
  const TemporaryFolder folder;
  auto make = [](const std::vector<Tensor>& p) {
    return optim::Adam{{{.params = {p[0]}, .options = {.lr = 0.1, .amsgrad = true}},
                        {.params = {p[1], p[2]}, .options = {.lr = 0.05, .betas = {0.8, 0.9}}}}};
  };
  const auto whole = start(DType::f32, Layout::contiguous),
             parts = start(DType::f32, Layout::contiguous);
  auto a = make(whole), b = make(parts);
  for (int step = 0; step < 6; ++step) {
    set_gradients(whole, step, Layout::contiguous);
    set_gradients(parts, step, Layout::contiguous);
    a.step();
    b.step();
    if (step == 2) a.set_lr(1, 0.2), b.set_lr(1, 0.2);
  }
  save_safetensors(folder / "optimizer.safetensors", b.state_dict());
  // A fresh optimizer over the same values, in another layout, with other options: all comes from
  // the file.
  std::vector<Tensor> resumed;
  for (const Tensor& p : parts)
    resumed.push_back(laid_out(p.detach(), Layout::transposed).requires_grad_());
  optim::Adam c{{{.params = {resumed[0]}}, {.params = {resumed[1], resumed[2]}}}};
  c.load_state_dict(load_safetensors(folder / "optimizer.safetensors").tensors);
  CHECK(c.lr(1) == 0.2);
  CHECK(c.options(0).amsgrad);
  for (int step = 6; step < kSteps; ++step) {
    set_gradients(whole, step, Layout::contiguous);
    set_gradients(resumed, step, Layout::contiguous);
    a.step();
    c.step();
  }
  for (size_t i = 0; i < 3; ++i) CHECK(difference(whole[i], resumed[i]) == 0);
  // b itself was not disturbed by its state being taken: the dict holds copies.
  auto state = b.state_dict();
  CHECK(state[1].first == "state.0.exp_avg");
  state[1].second.zero_();
  CHECK(difference(b.state_dict()[1].second, state[1].second) > 0);
}

TEST_CASE("load_state_dict: a state that does not fit is refused and changes nothing") {
  Tensor w = ones({3}).requires_grad_(), v = ones({2}).requires_grad_();
  optim::SGD a{{w}, {.lr = 0.1, .momentum = 0.9}}, two{{w, v}, {.lr = 0.5, .momentum = 0.9}};
  w.set_grad(ones({3}));
  v.set_grad(ones({2}));
  a.step();
  two.step();
  CHECK_THROWS_AS(a.load_state_dict(two.state_dict()), ValueError);
  CHECK(a.lr() == 0.1);
  auto state = a.state_dict();
  state[1].second = zeros({4});
  CHECK_THROWS_AS(a.load_state_dict(state), ValueError);
  CHECK_THROWS_AS(optim::Adam({w}, {}).load_state_dict(a.state_dict()), ValueError);
}

TEST_CASE("Optimizer: parameters and options are checked") {
  Tensor w = ones({3}).requires_grad_();
  CHECK_THROWS_AS(optim::SGD({}, {}), ValueError);
  CHECK_THROWS_AS(optim::SGD({w, w}, {}), ValueError);
  CHECK_THROWS_AS(optim::SGD({w * 2}, {}), ValueError);
  CHECK_THROWS_AS(optim::SGD({w}, {.lr = -1}), ValueError);
  CHECK_THROWS_AS(optim::SGD({w}, {.nesterov = true}), ValueError);
  CHECK_THROWS_AS(optim::AdamW({w}, {.betas = {1, 0.9}}), ValueError);
  CHECK_THROWS_AS(optim::SGD({w}, {}).set_lr(2, 0.1), IndexError);
  CHECK(optim::AdamW({w}, {}).options().weight_decay == 1e-2);
}

TEST_CASE("step: a module moved to another dtype keeps training with the same optimizer") {
  manual_seed(1);
  nn::Linear net{4, 1};
  const Tensor x = randn({32, 4}), target = x.sum({1}, true);
  optim::SGD opt{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
  double loss = 0;
  for (int step = 0; step < 200; ++step) {
    if (step == 100) net.to(DType::f64);
    const Tensor e = net(x.to(net.weight.dtype())) - target.to(net.weight.dtype());
    opt.zero_grad();
    e.square().mean().backward();
    opt.step();
    loss = e.square().mean().item<double>();
  }
  CHECK(loss < 1e-6);
}

TEST_CASE("step: an error changes no parameter, no state and no count") {
  Tensor w = ones({3}).requires_grad_(), half = ones({2}).requires_grad_();
  const auto set = [&] {
    w.set_grad(ones({3}));
    half.set_grad(ones(half.shape(), {.dtype = half.dtype()}));
  };
  optim::Adam opt{{w, half}, {.lr = 0.1}};
  set();
  opt.step();
  const Tensor before = w.detach().clone();
  const auto state = opt.state_dict();
  const auto unchanged = [&] {
    CHECK(difference(w, before) == 0);
    const auto now = opt.state_dict();
    REQUIRE(now.size() == state.size());
    for (size_t i = 0; i < now.size(); ++i)
      if (now[i].first.starts_with("state.0"))
        CHECK(difference(now[i].second, state[i].second) == 0);
  };
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Holder holder;
    static_cast<Tensor&>(holder.p) = half;  // the optimizer's own tensor
    holder.to(dtype);
    set();
    const std::string text = error_of<DTypeError>([&] { opt.step(); });
    CHECK_MESSAGE(contains(text, "step: parameters are f32 or f64, parameter 1 of shape [2] is"),
                  text);
    unchanged();
    holder.to(DType::f32);
  }
  opt.options().lr = -1;
  CHECK_THROWS_AS(opt.step(), ValueError);
  unchanged();
  opt.options().lr = 0.1;
  // The next step is the second one, as if nothing had happened.
  Tensor same = ones({3}).requires_grad_();
  optim::Adam other{{same}, {.lr = 0.1}};
  set();
  opt.step();
  for (int i = 0; i < 2; ++i) {
    same.set_grad(ones({3}));
    other.step();
  }
  CHECK(difference(w, same) == 0);
}

TEST_CASE("Optimizer: a group may be empty, in steps, schedules and states too") {
  nn::Linear layer{2, 2, {.bias = false}};
  optim::AdamW opt{{{.params = {layer.weight}, .options = {.lr = 0.1}},
                    {.params = {}, .options = {.lr = 0.2, .weight_decay = 0}}}};
  optim::StepLR schedule{opt, {.step_size = 1, .gamma = 0.5}};
  layer.weight.set_grad(ones({2, 2}));
  opt.step();
  schedule.step();
  CHECK(opt.groups() == 2);
  CHECK(opt.params(1).empty());
  CHECK(opt.lr(1) == 0.1);
  optim::AdamW other{{{.params = {layer.weight}}, {.params = {}}}};
  other.load_state_dict(opt.state_dict());
  CHECK(other.lr(1) == 0.1);
  CHECK(other.options(1).weight_decay == 0);
  CHECK_THROWS_AS(optim::AdamW({{.params = {}}, {.params = {}}}), ValueError);
}

TEST_CASE("step: parameters without elements") {
  const auto check = [](auto opt, const Tensor& p) {
    p.set_grad(zeros(p.shape()));
    opt.step();
    opt.step();
    CHECK(p.shape() == Shape{0, 3});
    CHECK_NOTHROW(opt.load_state_dict(opt.state_dict()));
  };
  const Tensor p = zeros({0, 3}).requires_grad_();
  check(optim::SGD({p}, {.momentum = 0.9, .nesterov = true}), p);
  check(optim::AdamW({p}, {.amsgrad = true}), p);
}

TEST_CASE("Optimizer: a parameter in two of them, or twice in one, is an error that says which") {
  Tensor w = ones({3}).requires_grad_(), v = ones({2}).requires_grad_();
  CHECK(error_of<ValueError>([&] {
          optim::SGD({{.params = {w}}, {.params = {v, w}}});
        }) == "optimizer: parameter 1 of group 1, of shape [3], is listed twice, first in group 0");
  CHECK(error_of<ValueError>([&] {
          optim::SGD({v, w, v}, {});
        }) == "optimizer: parameter 2 of group 0, of shape [2], is listed twice, first in group 0");
  CHECK(contains(error_of<ValueError>([&] {
                   optim::SGD({v, Tensor()}, {});
                 }),
                 "parameter 1 of group 0 is undefined"));
  CHECK(contains(error_of<ValueError>([&] { optim::SGD({v, w * 2}, {}); }), "was made by mul"));
}

TEST_CASE("load_state_dict: every misfit is listed, and options and states stay") {
  Tensor w = ones({3}).requires_grad_();
  optim::SGD opt{{w}, {.lr = 0.1, .momentum = 0.9}};
  w.set_grad(ones({3}));
  opt.step();
  const auto good = opt.state_dict();
  const auto entry = [](NamedTensors& state, const std::string& name) -> Tensor& {
    for (auto& [key, t] : state)
      if (key == name) return t;
    throw std::runtime_error(name);
  };
  const auto refuse = [&](const NamedTensors& state, const std::string& part) {
    const std::string text = error_of<ValueError>([&] { opt.load_state_dict(state); });
    CHECK_MESSAGE(contains(text, part), text);
    const auto now = opt.state_dict();
    REQUIRE(now.size() == good.size());
    for (size_t i = 0; i < now.size(); ++i) {
      CHECK(now[i].first == good[i].first);
      CHECK(difference(now[i].second, good[i].second) == 0);
    }
  };
  const TensorOptions f64{.dtype = DType::f64};
  auto state = good;
  entry(state, "param_groups.0.lr") = full({}, -1, f64);
  entry(state, "param_groups.0.momentum") = full({}, 0.5, f64);
  refuse(state, "param_groups.0 (SGD: lr must not be negative, got -1)");
  entry(state, "param_groups.0.lr") = full({}, NAN, f64);
  refuse(state, "param_groups.0.lr (must be one number, and is nan)");
  state = good;
  entry(state, "state.0.momentum_buffer") = ones({4});
  refuse(state, "state.0.momentum_buffer (given [4], here [3])");
  entry(state, "state.0.momentum_buffer") = ones({3}, {.dtype = DType::i64});
  refuse(state, "state.0.momentum_buffer (given i64, must be floating)");
  state = good;
  entry(state, "state.0.step") = full({}, 0.5, f64);
  refuse(state, "state.0.step (not a count: 0.5)");
  state = good;
  state.push_back(state[0]);
  state.emplace_back("state.9.step", full({}, 1, f64));
  refuse(state, "(given twice)");
  refuse(state, "unexpected: state.9.step");
  state = good;
  std::erase_if(state, [](auto& e) { return e.first == "state.0.momentum_buffer"; });
  refuse(state, "missing: state.0.momentum_buffer");
}

TEST_CASE("load_state_dict: the state of an optimizer of more or fewer parameters is a misfit") {
  const auto leaves = [](size_t n) {
    std::vector<Tensor> all;
    for (size_t i = 0; i < n; ++i) all.push_back(ones({3}).requires_grad_());
    return all;
  };
  const auto refuse = [](optim::Adam& from, optim::Adam& to, const std::string& part) {
    const std::string text = error_of<ValueError>([&] { to.load_state_dict(from.state_dict()); });
    CHECK_MESSAGE(contains(text, part), text);
  };
  optim::Adam two{leaves(2), {}}, three{leaves(3), {}};
  refuse(two, three, "param_groups.0.params (given 2, here 3)");  // none has a state yet
  for (const Tensor& p : two.params(0)) p.set_grad(ones({3}));
  two.step();
  refuse(two, three, "param_groups.0.params (given 2, here 3)");
  refuse(three, two, "param_groups.0.params (given 3, here 2)");
  const auto groups = [&](size_t a, size_t b) {
    return optim::Adam{{{.params = leaves(a)}, {.params = leaves(b)}}};
  };
  optim::Adam wide = groups(2, 1), narrow = groups(1, 2);  // as many in all
  refuse(wide, narrow, "param_groups.0.params (given 2, here 1), param_groups.1.params (given 1");
  optim::Adam again = groups(2, 1);
  CHECK_NOTHROW(again.load_state_dict(wide.state_dict()));
}

TEST_CASE("step: it follows a parameter that is cast, and not one that is replaced") {
  nn::Linear layer{2, 1, {.bias = false}};
  optim::SGD opt{layer.parameters(), {.lr = 1, .momentum = 0.5}};
  nn::init::zeros_(layer.weight);
  layer.weight.set_grad(ones({1, 2}));
  opt.step();
  layer.to(DType::f64);  // the gradient with it, and the momentum at the next step
  opt.step();
  CHECK(layer.weight.to_vector<double>() == std::vector<double>{-2.5, -2.5});
  layer.weight = nn::Parameter(zeros({1, 2}));
  layer.weight.set_grad(ones({1, 2}));
  opt.step();
  CHECK(difference(layer.weight, zeros({1, 2})) == 0);
}

TEST_CASE("step: an infinite element stays where nothing decays") {
  const auto after = [](auto make) {
    const Tensor p = tensor<float>({-INFINITY, 1}).requires_grad_();
    p.set_grad(tensor<float>({0, 1}));
    make(p).step();
    return p[0].item<float>();
  };
  CHECK(after([](Tensor p) { return optim::SGD{{p}, {.lr = 0.1}}; }) == -INFINITY);
  CHECK(after([](Tensor p) { return optim::SGD{{p}, {.lr = 0.1, .momentum = 0.9}}; }) == -INFINITY);
  CHECK(after([](Tensor p) { return optim::Adam{{p}, {.lr = 0.1}}; }) == -INFINITY);
  CHECK(after([](Tensor p) { return optim::AdamW{{p}, {.lr = 0.1, .weight_decay = 0}}; }) ==
        -INFINITY);
}

TEST_CASE("load_state_dict: a negative initial_lr is a misfit") {
  const Tensor w = ones({3}).requires_grad_();
  optim::SGD opt{{w}, {.lr = 0.1}};
  NamedTensors state = opt.state_dict();
  bool found = false;
  for (auto& [name, t] : state)
    if (name == "param_groups.0.initial_lr") {
      t = full({}, -7, {.dtype = DType::f64});
      found = true;
    }
  if (!found) state.emplace_back("param_groups.0.initial_lr", full({}, -7, {.dtype = DType::f64}));
  CHECK_THROWS_AS(opt.load_state_dict(state), ValueError);
}

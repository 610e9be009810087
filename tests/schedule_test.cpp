// Schedules against PyTorch over 40 steps of two groups, several schedules of one optimizer, rates
// set by hand, optimizers that move or go, resuming, and refusals.
#include <doctest/doctest.h>

#include <cmath>

#include <lockstep/optim/optim.h>

#include "golden.h"
#include "texts.h"

using namespace lockstep;

namespace {

struct TwoGroups {
  Tensor a = zeros({1}).requires_grad_(), b = zeros({1}).requires_grad_();
  optim::SGD opt{
      {{.params = {a}, .options = {.lr = 0.4}}, {.params = {b}, .options = {.lr = 0.02}}}};
};

template <class Make>
void check(const std::string& name, Make make) {
  CAPTURE(name);
  const Golden golden("optim.safetensors");
  const Tensor rates = golden["schedule." + name];  // [40, 2]
  TwoGroups groups;
  optim::LRScheduler schedule = make(groups.opt);
  for (int64_t step = 0; step < rates.size(0); ++step) {
    for (int g = 0; g < 2; ++g)
      CHECK(std::abs(groups.opt.lr(g) - rates[step][g].item<double>()) < 1e-14);
    CHECK(schedule.steps() == step);
    schedule.step();
  }
  // The count is the whole state.
  TwoGroups other;
  optim::LRScheduler resumed = make(other.opt);
  resumed.set_steps(17);
  for (int g = 0; g < 2; ++g)
    CHECK(std::abs(other.opt.lr(g) - rates[17][g].item<double>()) < 1e-14);
}

}  // namespace

TEST_CASE("LRScheduler: rates equal PyTorch's") {
  using O = optim::Optimizer&;
  check("lambda", [](O o) {
    return optim::LambdaLR{o, [](int64_t t) { return 1 / (1.0 + static_cast<double>(t)); }};
  });
  check("step", [](O o) { return optim::StepLR{o, {.step_size = 7, .gamma = 0.3}}; });
  check("multi_step", [](O o) {
    return optim::MultiStepLR{o, {.milestones = {30, 3, 10}, .gamma = 0.5}};
  });
  check("exponential", [](O o) { return optim::ExponentialLR{o, {.gamma = 0.9}}; });
  check("linear", [](O o) { return optim::LinearLR{o}; });
  check("linear_down", [](O o) {
    return optim::LinearLR{o, {.start_factor = 1, .end_factor = 0.2, .total_iters = 8}};
  });
  check("cosine", [](O o) { return optim::CosineAnnealingLR{o, {.T_max = 10, .eta_min = 0.01}}; });
  check("sequential", [](O o) {
    return optim::SequentialLR{o,
                               {optim::LinearLR{o, {.start_factor = 0.1, .total_iters = 5}},
                                optim::CosineAnnealingLR{o, {.T_max = 20}},
                                optim::StepLR{o, {.step_size = 3, .gamma = 0.5}}},
                               {5, 25}};
  });
}

TEST_CASE("load_state_dict: the initial rate survives a checkpoint in the middle of a schedule") {
  TwoGroups a, b;
  optim::StepLR schedule{a.opt, {.step_size = 1, .gamma = 0.5}};
  for (int i = 0; i < 3; ++i) schedule.step();
  CHECK(a.opt.lr() == 0.4 / 8);
  b.opt.load_state_dict(a.opt.state_dict());
  CHECK(b.opt.lr() == 0.4 / 8);
  optim::StepLR resumed{b.opt, {.step_size = 1, .gamma = 0.5}};
  resumed.set_steps(schedule.steps());
  CHECK(b.opt.lr(0) == 0.4 / 8);
  CHECK(b.opt.lr(1) == 0.02 / 8);
}

TEST_CASE("LRScheduler: options are checked") {
  TwoGroups g;
  optim::Optimizer& o = g.opt;
  CHECK_THROWS_AS(optim::StepLR(o, {.step_size = 0}), ValueError);
  CHECK_THROWS_AS(optim::LinearLR(o, {.start_factor = 0}), ValueError);
  CHECK_THROWS_AS(optim::CosineAnnealingLR(o, {.T_max = 0}), ValueError);
  CHECK_THROWS_AS(optim::SequentialLR(o, {optim::LinearLR{o}}, {3}), ValueError);
  CHECK_THROWS_AS(
      optim::SequentialLR(o, {optim::LinearLR{o}, optim::LinearLR{o}, optim::LinearLR{o}}, {5, 5}),
      ValueError);
  CHECK_THROWS_AS(optim::LinearLR(o).set_steps(-1), ValueError);
}

TEST_CASE(
    "state_dict: a schedule's state is its count; loading sets the rates, and refuses what is none") {
  Tensor w = ones({2}).requires_grad_();
  optim::SGD opt{{w}, {.lr = 0.8}};
  optim::StepLR schedule{opt, {.step_size = 2, .gamma = 0.5}};
  for (int i = 0; i < 5; ++i) schedule.step();
  const NamedTensors state = schedule.state_dict();
  optim::SGD other{{w}, {.lr = 0.8}};
  optim::StepLR again{other, {.step_size = 2, .gamma = 0.5}};
  again.load_state_dict(state);
  CHECK(again.steps() == 5);
  CHECK(other.lr() == 0.8 * 0.25);
  for (const NamedTensors& bad :
       {NamedTensors{}, NamedTensors{{"steps", ones({})}},
        NamedTensors{{"steps", tensor<int64_t>({-1}, Shape{})}},
        NamedTensors{{"steps", tensor<int64_t>({1, 2})}},
        NamedTensors{{"steps", tensor<int64_t>({1})}, {"more", ones({})}}})
    CHECK_THROWS_AS(again.load_state_dict(bad), ValueError);
  CHECK(again.steps() == 5);
}

TEST_CASE(
    "LRScheduler: two schedules of one optimizer multiply, in whatever order they are stepped") {
  for (const bool warm_up_first : {true, false}) {
    TwoGroups g;
    optim::LinearLR warm_up{g.opt, {.start_factor = 0.25, .total_iters = 4}};
    optim::ExponentialLR decay{g.opt, {.gamma = 0.5}};
    for (int i = 0; i < 8; ++i) {
      const double factor = std::pow(0.5, i) * (0.25 + 0.75 * std::min(i, 4) / 4);
      CHECK(g.opt.lr(0) == doctest::Approx(0.4 * factor).epsilon(1e-12));
      CHECK(g.opt.lr(1) == doctest::Approx(0.02 * factor).epsilon(1e-12));
      CHECK(g.opt.initial_lr(0) == 0.4);
      g.opt.step();
      (warm_up_first ? static_cast<optim::LRScheduler&>(warm_up) : decay).step();
      (warm_up_first ? static_cast<optim::LRScheduler&>(decay) : warm_up).step();
    }
  }
}

TEST_CASE("set_lr: later steps change a rate set by hand by the schedule's ratio, as in PyTorch") {
  TwoGroups g;
  optim::StepLR half{g.opt, {.step_size = 3, .gamma = 0.5}};
  g.opt.set_lr(0.01);
  half.step();
  half.step();
  CHECK(g.opt.lr(0) == doctest::Approx(0.01));  // between milestones
  half.step();
  CHECK(g.opt.lr(0) == doctest::Approx(0.005));
  CHECK(g.opt.lr(1) == doctest::Approx(0.005));
  g.opt.options(1).lr = 0.3;  // the same by the option itself
  for (int i = 0; i < 3; ++i) half.step();
  CHECK(g.opt.lr(0) == doctest::Approx(0.0025));
  CHECK(g.opt.lr(1) == doctest::Approx(0.15));
  // PyTorch's recursion of the cosine: eta + (lr - eta) (1 + cos(pi t / T)) / (1 + cos(pi (t - 1) /
  // T)).
  TwoGroups c;
  optim::CosineAnnealingLR cosine{c.opt, {.T_max = 10, .eta_min = 0.001}};
  for (int i = 0; i < 3; ++i) cosine.step();
  c.opt.set_lr(0, 0.05);
  double want = 0.05;
  for (int t = 4; t < 10; ++t) {
    cosine.step();
    want = 0.001 +
           (want - 0.001) * (1 + std::cos(M_PI * t / 10)) / (1 + std::cos(M_PI * (t - 1) / 10));
    CHECK(c.opt.lr(0) == doctest::Approx(want).epsilon(1e-9));
  }
  CHECK_THROWS_AS(c.opt.set_lr(-1), ValueError);
  CHECK_THROWS_AS(c.opt.set_lr(NAN), ValueError);
  CHECK(c.opt.lr(0) == doctest::Approx(want).epsilon(1e-9));
}

TEST_CASE("LRScheduler: it follows an optimizer that is moved, and notices when that is gone") {
  Tensor w = ones({1}).requires_grad_();
  std::vector<optim::SGD> kept;
  kept.emplace_back(std::vector{w}, optim::SGDOptions{.lr = 1});
  optim::StepLR schedule{kept[0], {.step_size = 1, .gamma = 0.5}};
  for (int i = 0; i < 5; ++i) kept.emplace_back(std::vector{w}, optim::SGDOptions{.lr = 3});
  schedule.step();
  CHECK(kept[0].lr() == 0.5);
  optim::SGD target = std::move(kept[0]);
  schedule.step();
  CHECK(target.lr() == 0.25);
  CHECK(schedule.lr() == 0.25);
  w.set_grad(ones({1}));
  target.step();
  CHECK(w.item<double>() == 0.75);
  // Assigned over: the schedule of the one that was there is without an optimizer.
  optim::StepLR other{kept[1], {.step_size = 1, .gamma = 0.1}};
  kept[1] = std::move(target);
  schedule.step();
  CHECK(kept[1].lr() == 0.125);
  CHECK(contains(error_of([&] { other.step(); }), "its optimizer is gone"));
  CHECK_THROWS_AS(other.lr(), Error);
  CHECK(other.steps() == 0);
  kept.clear();
  CHECK(contains(error_of([&] { schedule.step(); }), "its optimizer is gone"));
  CHECK_THROWS_AS(optim::StepLR(target, {.step_size = 1}), Error);  // NOLINT: moved from
}

TEST_CASE("LRScheduler: one that ends leaves the rates, and the others go on from them") {
  TwoGroups g;
  optim::ExponentialLR decay{g.opt, {.gamma = 0.5}};
  {
    const optim::LinearLR warm_up{g.opt, {.start_factor = 0.25, .total_iters = 4}};
    decay.step();
    CHECK(g.opt.lr() == doctest::Approx(0.4 * 0.25 * 0.5));
  }
  CHECK(g.opt.lr() == doctest::Approx(0.4 * 0.25 * 0.5));
  decay.step();
  CHECK(g.opt.lr() == doctest::Approx(0.4 * 0.25 * 0.25));
}

TEST_CASE("LRScheduler: what a formula throws, or a rate that is none, changes nothing") {
  TwoGroups g;
  double factor = 1;
  optim::LambdaLR schedule{g.opt, [&](int64_t) {
                             if (factor == 7) throw 7;
                             return factor;
                           }};
  optim::ExponentialLR decay{g.opt, {.gamma = 0.5}};
  decay.step();
  for (const double bad : {7.0, -1.0, double{NAN}}) {
    factor = bad;
    CHECK_THROWS(schedule.step());
    CHECK_THROWS(decay.step());
    CHECK(schedule.steps() == 0);
    CHECK(decay.steps() == 1);
    CHECK(g.opt.lr() == 0.2);
    CHECK_THROWS(optim::LinearLR(g.opt));
    CHECK(g.opt.lr() == 0.2);
  }
  factor = 0.5;
  schedule.step();
  CHECK(g.opt.lr() == doctest::Approx(0.1));
}

TEST_CASE("SequentialLR: its parts act through it alone, and belong to its optimizer") {
  TwoGroups a, b;
  optim::LinearLR warm_up{a.opt, {.start_factor = 0.5, .total_iters = 2}};
  optim::ExponentialLR decay{a.opt, {.gamma = 0.5}};
  optim::SequentialLR schedule{a.opt, {warm_up, decay}, {2}};
  CHECK(a.opt.lr() == 0.2);
  CHECK(contains(error_of([&] { warm_up.step(); }), "part of a SequentialLR"));
  for (int i = 0; i < 3; ++i) schedule.step();
  CHECK(a.opt.lr() == 0.2);  // 0.4 * 0.5
  optim::ExponentialLR foreign{b.opt, {.gamma = 0.5}}, own{a.opt, {.gamma = 0.5}};
  CHECK(contains(error_of<ValueError>([&] {
                   optim::SequentialLR(a.opt, {own, foreign}, {2});
                 }),
                 "schedule 1 is one of another optimizer"));
  own.step();  // still acts
  CHECK(a.opt.lr() == doctest::Approx(0.1));
}

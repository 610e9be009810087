// Schedules against PyTorch over 40 steps of two groups, resuming, and refusals.
#include <doctest/doctest.h>

#include <lockstep/optim/optim.h>

#include "golden.h"

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

TEST_CASE("rates equal PyTorch's") {
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

TEST_CASE("the initial rate survives a checkpoint in the middle of a schedule") {
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

TEST_CASE("options are checked") {
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

TEST_CASE("a schedule's state is its count; loading sets the rates, and refuses what is none") {
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

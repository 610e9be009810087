// The kernel calls of a training step, kept and made again: with other inputs they do what the step itself
// would do, to the same bits, without a graph and without new memory.
#include <doctest/doctest.h>

#include <lockstep/lockstep.h>
#include <lockstep/tensor/ops/copy.h>

#include "step_models.h"

using namespace lockstep;
using step_models::Cnn, step_models::Mixed, step_models::Mlp;

namespace {

struct Calls {
  std::vector<std::string> names;
  std::vector<std::function<void()>> again;
};
/// Keeps the calls made while it lives.
class Recording final : public KernelRecorder {
 public:
  explicit Recording(Calls& calls) : calls_(calls) {}
  void called(const KernelEntry& kernel, std::function<void()> again) override {
    calls_.names.push_back(kernel.name());
    calls_.again.push_back(std::move(again));
  }

 private:
  Calls& calls_;
};

struct Batch {
  Tensor x, y;
};
Batch batch(uint64_t seed) {
  const Generator before = default_generator();
  default_generator() = GeneratorState{.seed = seed};
  Batch b{randn({6, 1, 28, 28}), randint(0, 10, {6})};
  default_generator() = before;
  return b;
}

template <class Net, class Opt>
Tensor step(Net& net, Opt& opt, const Batch& b, double clip) {
  opt.zero_grad();
  Tensor loss = cross_entropy(net(b.x), b.y, {.label_smoothing = 0.1});
  loss.backward();
  if (clip > 0) optim::clip_grad_norm_(net.parameters(), clip);
  opt.step();
  return loss.detach();
}

std::vector<std::vector<float>> values_of(nn::Module& net) {
  std::vector<std::vector<float>> all;
  for (const auto& [name, t] : net.state_dict()) all.push_back(t.to_vector<float>());
  return all;
}

/// Trains twice from the same start: five steps as usual, and one that is recorded after the first and made
/// again for the others.
template <class Net, class Opt, class Options>
void check(Options options, double clip = 0) {
  constexpr int kSteps = 5;
  const auto rate = [](int i) { return 0.02 / (1 + i); };
  std::vector<float> losses;
  std::vector<std::vector<float>> expected;
  GeneratorState drawn;
  {
    manual_seed(3);
    Net net;
    Opt opt{net.parameters(), options};
    for (int i = 0; i < kSteps; ++i) {
      opt.set_lr(rate(i));
      losses.push_back(step(net, opt, batch(static_cast<uint64_t>(i)), clip).template item<float>());
    }
    expected = values_of(net);
    drawn = default_generator().state();
  }
  manual_seed(3);
  Net net;
  Opt opt{net.parameters(), options};
  opt.set_lr(rate(0));
  step(net, opt, batch(0), clip);  // makes the state
  const Batch input = batch(1);
  opt.set_lr(rate(1));
  Calls calls;
  const Tensor loss = [&] {
    const Recording recording(calls);
    return step(net, opt, input, clip);
  }();
  CHECK(loss.item<float>() == losses[1]);
  REQUIRE(calls.again.size() > 5);
  const uint64_t nodes = next_node_sequence();
  const MemoryStats memory = memory_stats();
  for (int i = 2; i < kSteps; ++i) {
    const Batch next = batch(static_cast<uint64_t>(i));
    kernels::copy(input.x, next.x);
    kernels::copy(input.y, next.y);
    opt.set_lr(rate(i));
    for (const auto& call : calls.again) call();
    CHECK(loss.item<float>() == losses[static_cast<size_t>(i)]);
  }
  CHECK(next_node_sequence() == nodes);
  CHECK(memory_stats().active_bytes == memory.active_bytes);
  CHECK(values_of(net) == expected);
  CHECK(default_generator().state() == drawn);
}

}  // namespace

TEST_CASE("replay: a step of the MLP demo") {
  check<Mlp, optim::SGD>(optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
}
TEST_CASE("replay: a step of the CNN demo") {
  check<Cnn, optim::SGD>(optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
}
TEST_CASE("replay: random numbers, running statistics, clipping and Adam's counts go on") {
  check<Mixed, optim::AdamW>(optim::AdamWOptions{.weight_decay = 0.1}, 0.5);
}

TEST_CASE("recorder: calls inside kernels are part of those, and scopes nest") {
  const Tensor x = randn({4, 6}), w = randn({3, 6});
  Calls outer, inner;
  const Recording first(outer);
  linear(x, w);
  {
    const Recording second(inner);
    linear(x, w);
  }
  CHECK(inner.names == std::vector<std::string>{"linear"});
  CHECK(outer.names == std::vector<std::string>{"linear"});
}

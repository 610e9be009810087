// What happens when an allocation fails, tried for each allocation of an operation in turn: it throws
// std::bad_alloc or OutOfMemory, what it changes is as before (or as after, where the failure came
// late), nothing is leaked, and the same operation made again gives exactly what an undisturbed one
// gives. The operations: a training step, clipping, schedules, saving and loading of states, cloning,
// and a loader's epoch. Running statistics and the random generator move on in forward, so the caller
// of a repeated step sets them back; gradients may hold a part of a failed backward, so it clears
// them. (Convolutions here are f64, since those of f32 are oneDNN's, which reads through null where
// it has no memory; on threads of their own libgomp, too, ends the process.)
#include "failing_allocations.h"

#include <doctest/doctest.h>

#include <string>

#include <lockstep/autograd/grad.h>
#include <lockstep/data/loader.h>
#include <lockstep/data/tensor_dataset.h>
#include <lockstep/nn/nn.h>
#include <lockstep/optim/optim.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>

#include "temporary_folder.h"

using namespace lockstep;

namespace {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

/// The bytes of all tensors, with their names.
std::string bytes_of(const NamedTensors& tensors) {
  std::string bytes;
  for (const auto& [name, t] : tensors) {
    const Tensor dense = t.detach().contiguous();
    bytes += name;
    bytes.append(static_cast<const char*>(dense.data_ptr()),
                 static_cast<size_t>(dense.numel()) * size_of(dense.dtype()));
  }
  return bytes;
}
NamedTensors cloned(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, t] : tensors) copies.emplace_back(name, t.detach().clone());
  return copies;
}

struct Operation {
  std::function<void()> prepare;  // the state before
  std::function<void()> run;
  std::function<std::string()> state;  // what may not be changed by half
  std::function<void()> set_back = [] {
  };  // what a failed run may have changed, before the next one
  std::function<std::string()> result = state;  // what a run must end with
  std::function<void()> clean = [] {};          // gives up what a run may leave, such as gradients
};

/// Fails each allocation of the operation, alone and together with all that follow.
void fail_each_allocation(const Operation& o) {
  set_num_threads(1);
  o.prepare();
  const std::string before = o.state();
  int64_t allocations = 0;
  {
    FailingAllocations none(FailingAllocations::kAll, 0);
    o.run();
    allocations = FailingAllocations::count();
  }
  const std::string after = o.state(), result = o.result();
  REQUIRE(allocations > 0);
  for (int64_t failures : {int64_t{1}, FailingAllocations::kAll})
    for (int64_t k = 0; k < allocations; ++k) {
      CAPTURE(k);
      CAPTURE(failures);
      int64_t live = 0;
      for (int round = 0; round < 3; ++round) {
        o.prepare();
        bool thrown = true;
        try {
          FailingAllocations failing(k, failures);
          o.run();
          thrown = false;
        } catch (const std::bad_alloc&) {
        } catch (const OutOfMemory&) {
        } catch (const std::exception& e) {
          FAIL_CHECK("thrown: " << std::string(e.what()));
        }
        const std::string now = o.state();
        if (!thrown || now == after) {
          CHECK_MESSAGE((now == after), "it has not thrown, and the state is not as after");
        } else {
          CHECK_MESSAGE((now == before), "the state is neither as before nor as after");
          o.set_back();
          o.run();
          CHECK_MESSAGE((o.result() == result), "the next run gives something else");
        }
        o.clean();
        if (round == 2)
          CHECK_MESSAGE(FailingAllocations::live() <= live, "blocks are left behind each time");
        live = FailingAllocations::live();
      }
    }
}

/// A network, its optimizer and its data.
struct Training {
  nn::Sequential net;
  data::Loader<data::TensorDataset<2>> loader;
  std::unique_ptr<optim::Optimizer> optimizer;
  NamedTensors net_before = {}, optimizer_before = {};
  Generator generator_before = {};

  Training(nn::Sequential module, const Tensor& x, const Tensor& y, int64_t batch_size)
      : net(std::move(module)),
        loader(data::TensorDataset{x, y}, {.batch_size = batch_size, .shuffle = true}) {}

  /// The first batch of epoch 0.
  void step() {
    for (auto& [x, y] : loader.epoch(0)) {
      optimizer->zero_grad();
      const Tensor loss = cross_entropy(net(x), y);
      loss.backward();
      optim::clip_grad_norm_(net.parameters(), 0.1);
      optimizer->step();
      break;
    }
  }
  std::string parameters() const {
    return bytes_of(net.named_parameters()) + bytes_of(optimizer->state_dict());
  }
  std::string everything() const {
    return bytes_of(net.state_dict()) + bytes_of(optimizer->state_dict());
  }
  void keep_state() {
    net_before = cloned(net.state_dict());
    optimizer_before = optimizer->state_dict();
    generator_before = default_generator();
  }
  void restore() {
    net.load_state_dict(net_before);
    optimizer->load_state_dict(optimizer_before);
    restore_forward();
  }
  /// What forward alone moves.
  void restore_forward() {
    const NoGradGuard guard;
    for (auto& [name, buffer] : net.named_buffers())
      for (auto& [other, value] : net_before)
        if (name == other) Tensor(buffer).copy_(value);
    default_generator() = generator_before;
  }

  /// The step of an optimizer with state, or, if `first`, of one that has none yet.
  void fail_each_allocation_of_step(bool first) {
    step();  // what is made once is there
    keep_state();
    const auto make = [this] {
      optimizer = std::make_unique<optim::Adam>(net.parameters(), optim::AdamOptions{.lr = 0.01});
    };
    if (first) {
      make();
      keep_state();
    }
    fail_each_allocation({.prepare =
                              [=, this] {
                                if (first) make();
                                restore();
                              },
                          .run = [this] { step(); },
                          .state = [this] { return parameters(); },
                          .set_back = [this] { restore_forward(); },
                          .result = [this] { return everything(); },
                          .clean = [this] { optimizer->zero_grad(); }});
  }
  template <class O, class Options>
  void optimize_by(Options options) {
    optimizer = std::make_unique<O>(net.parameters(), options);
  }
};

struct Ties : nn::Module {
  nn::Conv2d conv{2, 3, 2};
  nn::Linear a{3, 3}, b{3, 3};
  nn::BatchNorm1d norm{3};
  Tensor forward(Tensor x) { return x; }
  LOCKSTEP_MODULE(Ties, conv, a, b, norm)
};

Training small_training() {
  manual_seed(1);
  return Training(nn::Sequential{nn::Linear{6, 8}, nn::ReLU{}, nn::LayerNorm{8}, nn::Dropout{0.2},
                                 nn::Linear{8, 3}},
                  randn({40, 6}), randint(0, 3, {40}), 20);
}

}  // namespace

TEST_CASE("allocation failure: a step of an MLP by Adam, the first and a later one") {
  for (bool first : {false, true}) {
    Training training = small_training();
    training.optimize_by<optim::Adam>(optim::AdamOptions{.lr = 0.01});
    training.fail_each_allocation_of_step(first);
  }
}

TEST_CASE("allocation failure: a step by SGD with momentum") {
  Training training = small_training();
  training.optimize_by<optim::SGD>(optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  training.fail_each_allocation_of_step(false);
}

TEST_CASE("allocation failure: a step with tensors that the allocator caches") {
  manual_seed(2);
  Training training(nn::Sequential{nn::Linear{60, 100}, nn::GELU{}, nn::Linear{100, 10}},
                    randn({256, 60}), randint(0, 10, {256}), 128);
  training.optimize_by<optim::AdamW>(optim::AdamWOptions{.amsgrad = true});
  training.fail_each_allocation_of_step(false);
}

TEST_CASE("allocation failure: a step of a CNN") {
  manual_seed(3);
  Training training(
      nn::Sequential{nn::Conv2d{1, 4, 3}, nn::BatchNorm2d{4}, nn::ReLU{}, nn::MaxPool2d{2},
                     nn::Flatten{}, nn::Dropout{0.2}, nn::Linear{36, 3}}
          .to(DType::f64),
      randn({12, 1, 8, 8}, {.dtype = DType::f64}), randint(0, 3, {12}), 6);
  training.optimize_by<optim::Adam>(optim::AdamOptions{});
  training.fail_each_allocation_of_step(false);
}

TEST_CASE("allocation failure: loading states changes all or nothing") {
  Training training = small_training();
  training.optimize_by<optim::Adam>(optim::AdamOptions{});
  training.step();
  training.keep_state();
  training.step();
  const NamedTensors net = cloned(training.net.state_dict());
  const NamedTensors optimizer = training.optimizer->state_dict();
  const auto state = [&] { return training.everything(); };
  const auto prepare = [&] { training.restore(); };
  fail_each_allocation(
      {.prepare = prepare, .run = [&] { training.net.load_state_dict(net); }, .state = state});
  fail_each_allocation({.prepare = prepare,
                        .run = [&] { training.optimizer->load_state_dict(optimizer); },
                        .state = state});
}

TEST_CASE("allocation failure: loading into tied, strided and converted tensors, all or nothing") {
  Ties net;
  static_cast<Tensor&>(net.b.weight) = net.a.weight;
  net.a.bias = nn::Parameter(zeros({3, 2}).t()[0]);  // with gaps
  NamedTensors before = cloned(net.state_dict()), other = cloned(net.state_dict());
  for (auto& [name, t] : other)
    t = name == "b.weight" ? other[2].second.clone() : rand(t.shape()).to(DType::f64);
  REQUIRE(other[2].first == "a.weight");
  const auto state = [&] { return bytes_of(net.state_dict()); };
  fail_each_allocation({.prepare = [&] { net.load_state_dict(before); },
                        .run = [&] { net.load_state_dict(other); },
                        .state = state});
  fail_each_allocation({.prepare = [&] { net.load_state_dict(before); },
                        .run =
                            [&] {
                              NamedTensors exchanged = net.state_dict();
                              std::swap(exchanged[3].first, exchanged[5].first);  // a.bias, b.bias
                              net.load_state_dict(exchanged);
                            },
                        .state = state});
}

TEST_CASE("allocation failure: clone() leaves the module as it was") {
  Training training = small_training();
  std::string copied;
  fail_each_allocation({.prepare = [&] { copied.clear(); },
                        .run =
                            [&] {
                              nn::Sequential copy = training.net.clone();
                              const std::string bytes = bytes_of(copy.state_dict());
                              copied = bytes;
                            },
                        .state = [&] { return bytes_of(training.net.state_dict()); },
                        .result = [&] { return copied; }});
}

TEST_CASE(
    "allocation failure: a loader gives the same batches afterwards, where it was resumed too") {
  Training training = small_training();
  for (int64_t start : {0, 20}) {
    std::string batches;
    fail_each_allocation(
        {.prepare =
             [&] {
               training.loader.resume({.epoch = 0, .samples = start});
               batches.clear();
             },
         .run =
             [&] {
               std::string read;
               for (auto& [x, y] : training.loader.epoch(0)) read += bytes_of({{"x", x}, {"y", y}});
               batches = std::move(read);
             },
         .state = [&] { return std::string(); },
         .set_back = [&] { training.loader.resume({.epoch = 0, .samples = start}); },
         .result = [&] { return batches; }});
  }
}

TEST_CASE("allocation failure: a step whose loss holds gradients made with create_graph") {
  Training training = small_training();
  training.optimize_by<optim::AdamW>(optim::AdamWOptions{.lr = 0.01});
  const Tensor x = randn({5, 6});
  const auto step = [&] {
    training.optimizer->zero_grad();
    const Tensor loss = training.net(x).square().mean();
    Tensor penalty = loss;
    for (const Tensor& g :
         autograd::grad({loss}, training.net.parameters(), {}, {.create_graph = true}))
      penalty = penalty + g.square().sum();
    penalty.backward();
    training.optimizer->step();
  };
  step();
  training.keep_state();
  fail_each_allocation({.prepare = [&] { training.restore(); },
                        .run = step,
                        .state = [&] { return training.parameters(); },
                        .set_back = [&] { training.restore_forward(); },
                        .result = [&] { return training.everything(); },
                        .clean = [&] { training.optimizer->zero_grad(); }});
}

TEST_CASE("allocation failure: clip_grad_norm_ scales all gradients or none") {
  const Tensor a = ones({5, 3}).requires_grad_(),
               b = ones({70}, {.dtype = DType::f64}).requires_grad_();
  const NamedTensors start{{"a", randn({5, 3})}, {"b", randn({70}, {.dtype = DType::f64})}};
  for (const double norm : {2.0, 3.0})
    fail_each_allocation({.prepare =
                              [&] {
                                a.set_grad(start[0].second.clone());
                                b.set_grad(start[1].second.clone());
                              },
                          .run =
                              [&] {
                                optim::clip_grad_norm_({a, b}, 0.1, {.norm_type = norm});
                              },
                          .state =
                              [&] {
                                return bytes_of({{"a", a.grad()}, {"b", b.grad()}});
                              }});
}

TEST_CASE("allocation failure: a schedule's step changes all rates or none") {
  Training training = small_training();
  training.optimize_by<optim::SGD>(optim::SGDOptions{.lr = 0.1});
  optim::LinearLR warm_up{*training.optimizer, {.start_factor = 0.1, .total_iters = 3}};
  optim::CosineAnnealingLR decay{*training.optimizer, {.T_max = 9}};
  optim::SequentialLR schedule{*training.optimizer, {warm_up, decay}, {3}};
  const auto start = schedule.state_dict();
  fail_each_allocation(
      {.prepare = [&] { schedule.load_state_dict(start); },
       .run = [&] { schedule.step(); },
       .state = [&] { return str_cat(schedule.steps(), " ", training.optimizer->lr()); }});
}

TEST_CASE("allocation failure: save leaves the old file or the new one, and load all or nothing") {
  const TemporaryFolder folder;
  const std::string path = folder / "net.safetensors";
  Training training = small_training();
  training.optimize_by<optim::SGD>(optim::SGDOptions{});
  training.keep_state();
  training.net.save(path);
  const std::string old = get_file(path);
  training.step();
  fail_each_allocation(
      {.prepare = [&] { put_file(path, old); },
       .run = [&] { training.net.save(path); },
       .state = [&] { return get_file(path) + std::to_string(folder.entries()); }});
  fail_each_allocation({.prepare = [&] { training.restore(); },
                        .run = [&] { training.net.load(path); },
                        .state = [&] { return training.everything(); }});
}

TEST_CASE("allocation failure: freeing needs no memory") {
  std::vector<Tensor> many;
  for (int i = 0; i < 500; ++i) many.push_back(empty({20000 + 20 * (i % 3)}));
  Tensor x = ones({3}).requires_grad_(), chain = x;
  for (int i = 0; i < 5000; ++i) chain = chain + 1.0;
  Tensor wide = x.sum();
  std::vector<Tensor> parts;
  for (int i = 0; i < 500; ++i) parts.push_back(x * 2.0);
  wide = cat(parts);
  parts.clear();
  FailingAllocations failing(0, FailingAllocations::kAll);
  many.clear();
  chain = Tensor();
  wide = Tensor();
}

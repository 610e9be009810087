// Threads of the user's own that share nothing, or views of one tensor: each trains a module of its own,
// or draws from a generator of its own. What they compute is compared with the same work done one
// after the other.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/nn/nn.h>
#include <lockstep/optim/optim.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;

namespace {

constexpr int kThreads = 4;

/// f(0), f(1), ... on a thread each; what they throw fails the test.
void on_threads(const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(kThreads);
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      try {
        f(t);
      } catch (const std::exception& e) {
        errors[static_cast<size_t>(t)] = e.what();
      }
    });
  for (std::thread& t : threads) t.join();
  for (const std::string& e : errors) CHECK(e == "");
}

std::string bytes_of(const Tensor& t) {
  const Tensor dense = t.detach().contiguous();
  return std::string(static_cast<const char*>(dense.data_ptr()),
                     static_cast<size_t>(dense.numel()) * size_of(dense.dtype()));
}

nn::Sequential network() {
  return nn::Sequential{nn::Conv2d{1, 4, 3},  nn::BatchNorm2d{4}, nn::ReLU{},
                        nn::MaxPool2d{2},     nn::Flatten{},      nn::Dropout{0.3},
                        nn::Linear{4 * 9, 6}, nn::LayerNorm{6},   nn::Linear{6, 3}};
}

/// A whole training from a seed: the bytes of everything that it ends with.
std::string train(int seed) {
  manual_seed(static_cast<uint64_t>(seed));
  nn::Sequential net = network();
  optim::AdamW opt{net.parameters(), {.lr = 0.01}};
  optim::CosineAnnealingLR schedule{opt, {.T_max = 8}};
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({6, 1, 8, 8}), y = randint(0, 3, {6});
    opt.zero_grad();
    cross_entropy(net(x), y).backward();
    optim::clip_grad_norm_(net.parameters(), 0.5);
    opt.step();
    schedule.step();
  }
  std::string bytes;
  for (const auto& [name, t] : net.state_dict()) bytes += bytes_of(t);
  for (const auto& [name, t] : opt.state_dict()) bytes += bytes_of(t);
  return bytes;
}

}  // namespace

TEST_CASE("backward and step: threads that train modules of their own do not meet") {
  const int before = get_num_threads();
  std::vector<std::string> alone, together(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    std::thread([&, t] { alone.push_back(train(t)); }).join();
  }
  CHECK(alone[0] != alone[1]);
  for (const int inner : {1, 2}) {  // with the thread pool, and without
    on_threads([&](int t) {
      set_num_threads(inner);
      together[static_cast<size_t>(t)] = train(t);
    });
    CHECK(together == alone);
  }
  CHECK(get_num_threads() == before);
}

TEST_CASE("Tensor::node: threads that read one outdated view agree on where it comes from") {
  for (int round = 0; round < 50; ++round) {
    const Tensor w = full({6}, 2, {.dtype = DType::f64}).requires_grad_();
    Tensor base = zeros({6}, {.dtype = DType::f64});
    const Tensor part = base.narrow(0, 1, 3);
    base.copy_(w * 3.0);
    on_threads([&](int) { (part * 1.0).sum().backward({}, {.retain_graph = true}); });
    CHECK(w.grad().to_vector<double>() == std::vector<double>{0, 12, 12, 12, 0, 0});
  }
}

TEST_CASE("dropout and randn: a generator of one's own does not notice other threads") {
  Generator alone({.seed = 9});
  std::string want;
  for (int i = 0; i < 20; ++i) want += bytes_of(dropout(ones({50}), 0.5, true, alone));
  on_threads([&](int t) {
    Generator own({.seed = 9});
    std::string got;
    for (int i = 0; i < 20; ++i) {
      got += bytes_of(dropout(ones({50}), 0.5, true, own));
      if (t % 2) randn({7});  // moves the thread's default generator, which is another one
    }
    if (got != want) throw Error("other numbers");
  });
}

TEST_CASE("backward: another thread may let go of the leaf meanwhile") {
  const int before = get_num_threads();
  set_num_threads(1);
  std::atomic<int> begun{0}, done{0};
  constexpr int rounds = 3000;
  Tensor leaf;
  std::thread other([&] {
    for (int i = 1; i <= rounds; ++i) {
      while (begun.load() < i) std::this_thread::yield();
      for (volatile int wait = i * 7 % 60; wait > 0;) wait = wait - 1;
      leaf = Tensor();
      done.store(i);
    }
  });
  int64_t seen = 0;
  for (int i = 1; i <= rounds; ++i) {
    leaf = ones({4}).requires_grad_();
    leaf.register_post_accumulate_grad_hook([&](const Tensor& t) { seen += t.numel(); });
    const Tensor y = leaf.sum();
    begun.store(i);
    y.backward();
    while (done.load() < i) std::this_thread::yield();
  }
  other.join();
  CHECK(seen % 4 == 0);
  CHECK(seen <= 4 * rounds);
  set_num_threads(before);
}

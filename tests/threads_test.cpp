// What threads of a program may do at the same time, as docs/threads.md says: forward through one module,
// backward into the same leaves or through one graph, and random numbers of their own.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include <lockstep/lockstep.h>

using namespace lockstep;

namespace {

constexpr int kThreads = 4;

/// Calls f(t) on kThreads threads at once. What it throws ends the program.
void on_threads(const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&f, t] {
      set_num_threads(1 + t % 2);
      f(t);
    });
  for (std::thread& t : threads) t.join();
}

struct Net : nn::Module {
  nn::Conv2d conv{2, 4, 3};
  nn::BatchNorm2d norm{4};
  nn::Dropout dropout{0.5};
  nn::LayerNorm layer_norm{{4}};
  nn::Linear fc{4, 3};

  Tensor forward(Tensor x) {                   // x: [B, 2, 6, 6]
    x = relu(norm(conv(x)));                   //    [B, 4, 4, 4]
    x = dropout(max_pool2d(x, 4)).flatten(1);  // [B, 4]
    return fc(layer_norm(x));                  //    [B, 3]
  }
  LOCKSTEP_MODULE(Net, conv, norm, dropout, layer_norm, fc)
};

Tensor input(int t) {
  std::vector<double> values;
  for (int i = 0; i < 2 * 2 * 6 * 6; ++i) values.push_back((i * 7 + t * 13) % 23 / 11.0 - 1);
  return tensor(values, {2, 2, 6, 6}, {.dtype = DType::f32});
}

using Values = std::vector<double>;

}  // namespace

TEST_CASE(
    "forward of one module in eval gives each thread what it gives one, from the first call on") {
  Net net;
  net.eval();
  Net alone = net.clone();
  std::vector<Values> got(kThreads);
  on_threads([&](int t) {
    for (int i = 0; i < 20; ++i) got[static_cast<size_t>(t)] = net(input(t)).to_vector<double>();
  });
  for (int t = 0; t < kThreads; ++t)
    CHECK(got[static_cast<size_t>(t)] == alone(input(t)).to_vector<double>());
  CHECK(got[0] != got[1]);
}

TEST_CASE("backward on several threads adds up the gradients of the parameters that they share") {
  nn::Linear shared{5, 3, {.dtype = DType::f64}};
  auto step = [&](int t) {
    const Tensor x = full({2, 5}, t + 1, {.dtype = DType::f64});
    for (int i = 0; i < 50; ++i) shared(x).sum().backward();
  };
  on_threads(step);
  // d sum(x W' + b) / dW is the sum of x over the rows, and by b it is the number of rows.
  const double rows = 2 * 50, sum_of_x = rows * (1 + 2 + 3 + 4);
  CHECK(shared.weight.grad().to_vector<double>() == Values(15, sum_of_x));
  CHECK(shared.bias.grad().to_vector<double>() == Values(3, rows * kThreads));
}

TEST_CASE("backward through one graph on several threads that retain it") {
  Tensor x = full({3}, 2, {.dtype = DType::f64}).requires_grad_();
  const Tensor y = (exp(x) * x).sum();
  std::vector<Tensor> gradients(kThreads);
  on_threads([&](int t) {
    gradients[static_cast<size_t>(t)] = autograd::grad({y}, {x}, {}, {.retain_graph = true})[0];
    y.backward({}, {.retain_graph = true});
  });
  const double want = 3 * std::exp(2.0);  // (x + 1) exp(x)
  for (const Tensor& g : gradients) CHECK(g.to_vector<double>()[1] == doctest::Approx(want));
  CHECK(x.grad().to_vector<double>()[1] == doctest::Approx(kThreads * want));
}

TEST_CASE("dropout on several threads draws other masks, and the same ones from the same seed") {
  manual_seed(5);
  std::vector<Values> unseeded(kThreads), seeded(kThreads);
  on_threads([&](int t) {
    unseeded[static_cast<size_t>(t)] = dropout(ones({256}), 0.5).to_vector<double>();
    manual_seed(9);
    seeded[static_cast<size_t>(t)] = dropout(ones({256}), 0.5).to_vector<double>();
  });
  for (int t = 1; t < kThreads; ++t) {
    CHECK(seeded[static_cast<size_t>(t)] == seeded[0]);
    for (int s = 0; s < t; ++s)
      CHECK(unseeded[static_cast<size_t>(t)] != unseeded[static_cast<size_t>(s)]);
  }
}

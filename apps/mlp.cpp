// The smallest program worth copying: a multilayer perceptron on MNIST, on one process or on many.
//   build/bin/mlp data/mnist        build/bin/lockstep-run -n 2 build/bin/mlp data/mnist
#include <cstdio>

#include <lockstep/lockstep.h>
using namespace lockstep;

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "data/mnist";
  auto group = dist::init();
  data::Mnist train{folder, data::Split::train}, test{folder, data::Split::test};
  data::Loader loader{train, {.batch_size = 64, .shuffle = true, .workers = 1, .shard = group}};

  nn::Sequential mlp{nn::Flatten{}, nn::Linear{784, 128}, nn::ReLU{}, nn::Linear{128, 10}};
  dist::DistributedDataParallel net{std::move(mlp), group};
  optim::SGD opt{net.parameters(), {.lr = 0.05, .momentum = 0.9}};

  for (int epoch = 0; epoch < 3; ++epoch)
    for (auto [x, y] : loader.epoch(epoch)) {
      opt.zero_grad();
      cross_entropy(net(x), y).backward();
      opt.step();
    }

  NoGradGuard guard;
  Tensor correct = zeros({}, {.dtype = DType::i64});
  for (auto [x, y] : data::Loader{test, {.batch_size = 1000, .shard = group}}.epoch(0))
    correct += eq(net(x).argmax(1), y).sum();
  group.all_reduce(correct);
  const double part = correct.item<double>() / static_cast<double>(test.size());
  if (group.is_main()) std::printf("test accuracy %.2f %%\n", 100 * part);
} catch (const std::exception& e) {
  return dist::report_failure("mlp", e);
}

// The smallest program worth copying: a multilayer perceptron on MNIST, on one process or on many.
//   build/bin/mlp data/mnist        build/bin/lockstep-run -n 2 build/bin/mlp data/mnist
#include <cstdio>

#include <lockstep/lockstep.h>

#include "ddp_flags.h"
using namespace lockstep;

int main(int argc, char** argv) try {
  std::string folder = "data/mnist";
  DdpFlags ddp;
  CLI::App app{"Trains a multilayer perceptron on MNIST."};
  app.add_option("data", folder, "folder of the four MNIST files")->capture_default_str();
  ddp.add_to(app);
  parse_or_exit(app, argc, argv);

  auto group = dist::init(ddp.init());
  data::Mnist train{folder, data::Split::train}, test{folder, data::Split::test};
  data::Loader loader{train, {.batch_size = 64, .shuffle = true, .workers = 1, .shard = group}};

  nn::Sequential mlp{nn::Flatten{}, nn::Linear{784, 128}, nn::ReLU{}, nn::Linear{128, 10}};
  dist::DistributedDataParallel net{std::move(mlp), group, ddp.options};
  optim::SGD opt{net.parameters(), {.lr = 0.05, .momentum = 0.9}};

  for (int epoch = 0; epoch < 3; ++epoch) {
    double loss_sum = 0;
    for (auto [x, y] : loader.epoch(epoch)) {
      opt.zero_grad();
      Tensor loss = cross_entropy(net(x), y);
      loss.backward();
      opt.step();
      loss_sum += loss.item<double>();
    }
    const double loss = dist::mean(loss_sum / static_cast<double>(loader.size()), group);
    if (group.is_main()) std::printf("epoch %d: loss %.4f\n", epoch + 1, loss);
  }

  NoGradGuard guard;
  Tensor counts = zeros({2});  // correct, seen
  for (auto [x, y] : data::Loader{test, {.batch_size = 1000, .shard = group}}.epoch(0))
    counts +=
        tensor<float>({eq(net(x).argmax(1), y).sum().item<float>(), static_cast<float>(y.size(0))});
  group.all_reduce(counts);
  if (group.is_main())
    std::printf("test accuracy %.2f %%\n",
                100 * counts[0].item<double>() / counts[1].item<double>());
} catch (const std::exception& e) {
  return dist::report_failure("mlp", e);
}

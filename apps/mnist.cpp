// Trains a small convolutional network on MNIST under DistributedDataParallel and evaluates it.
// Alone it is a group of one; under a launcher it is as many ranks as that starts:
//   build/bin/mnist        build/bin/lockstep-run -n 2 build/bin/mnist --epochs 3
#include <cmath>
#include <cstdio>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/lockstep.h>
using namespace lockstep;

struct Net : nn::Module {
  nn::Conv2d conv1{1, 32, 3}, conv2{32, 64, 3};
  nn::Linear fc1{9216, 128}, fc2{128, 10, {.bias = false}};

  Tensor forward(Tensor x) {              // x: [B, 1, 28, 28]
    x = relu(conv1(x));                   //    [B, 32, 26, 26]
    x = max_pool2d(relu(conv2(x)), 2);    //    [B, 64, 12, 12]
    return fc2(relu(fc1(x.flatten(1))));  //    [B, 10]
  }
  LOCKSTEP_MODULE(Net, conv1, conv2, fc1, fc2)
};

struct Options {
  int epochs = 3, threads = 0;
  int64_t batch_size = 64, accumulation = 1;
  double lr = 0.05;
  uint64_t seed = 0;
  std::string data = "data/mnist", save;
};

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app{
      "Trains a convolutional network on MNIST, on one process or on all that a launcher started."};
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--epochs", o.epochs, "passes over the training set")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size,--batch_size", o.batch_size, "samples a step on each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--lr", o.lr, "peak learning rate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", o.seed, "of initialisation and of the order of samples")
      ->capture_default_str();
  app.add_option("--data", o.data, "folder of the four MNIST files")->capture_default_str();
  app.add_option("--save", o.save, "safetensors file for the trained model; not saved without");
  app.add_option("--gradient-accumulation-steps,--gradient_accumulation_steps", o.accumulation,
                 "batches whose gradients make one step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", o.threads,
                 "threads a rank; the launcher's share of the processors by default")
      ->check(CLI::PositiveNumber);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : 2);
  }
  return o;
}

template <class Net>
double accuracy(Net& net, const data::Mnist& test, const dist::Group& group) {
  NoGradGuard guard;
  net.eval();
  int64_t correct = 0, seen = 0;
  for (auto [x, y] :
       data::Loader{test, {.batch_size = 500, .workers = 1, .shard = group}}.epoch(0)) {
    correct += eq(net(x).argmax(1), y).sum().template item<int64_t>();
    seen += y.size(0);
  }
  net.train();
  Tensor counts = tensor<int64_t>({correct, seen});
  group.all_reduce(counts);
  LOCKSTEP_CHECK(counts[1].item<int64_t>() == test.size(), Error, "evaluation saw ",
                 counts[1].item<int64_t>(), " of ", test.size(), " samples");
  return 100.0 * counts[0].item<double>() / counts[1].item<double>();
}

void run(const Options& o) {
  auto group = dist::init();
  auto device = Device::best(group.local_rank());
  if (o.threads > 0) set_num_threads(o.threads);
  manual_seed(o.seed);

  data::Mnist train{o.data, data::Split::train}, test{o.data, data::Split::test};
  data::Loader loader{
      train,
      {.batch_size = o.batch_size, .shuffle = true, .workers = 1, .seed = o.seed, .shard = group}};

  dist::DistributedDataParallel net{Net{}.to(device), group};
  optim::SGD opt{net.parameters(), {.lr = o.lr, .momentum = 0.9}};
  const int64_t batches = loader.size(), windows = (batches + o.accumulation - 1) / o.accumulation;
  optim::CosineAnnealingLR schedule{opt, {.T_max = o.epochs * windows}};

  for (int epoch = 0; epoch < o.epochs; ++epoch) {
    data::Progress progress{
        str_cat("epoch ", epoch + 1, "/", o.epochs),
        batches,
        {.enabled = group.is_main(), .samples_factor = static_cast<double>(group.size())}};
    int64_t i = 0;
    for (auto [x, y] : loader.epoch(epoch)) {
      const int64_t in_window = i % o.accumulation,
                    window = std::min(o.accumulation, batches - (i - in_window));
      const bool last = in_window + 1 == window;
      const auto local = net.no_sync(!last);
      if (in_window == 0) opt.zero_grad();
      Tensor loss = cross_entropy(net(x.to(device)), y.to(device));
      const double value = loss.item<double>();
      LOCKSTEP_CHECK(std::isfinite(value), Error, "the loss is ", value, " at batch ", i,
                     " of epoch ", epoch + 1, "; try a smaller --lr than ", o.lr);
      (loss / static_cast<double>(window)).backward();
      if (last) {
        opt.step();
        schedule.step();
      }
      progress.step(x.size(0), value);
      ++i;
    }
    progress.finish();
  }

  const double percent = accuracy(net, test, group);
  if (!o.save.empty()) dist::run_on_main(group, [&] { net.module().save(o.save); });
  if (group.is_main()) std::printf("test accuracy %.2f %%\n", percent);
}

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  try {
    run(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mnist: %s\n", e.what());
    return 1;
  }
}

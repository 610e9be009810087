// Trains a small convolutional network on MNIST under DistributedDataParallel and evaluates it.
// Alone it is a group of one; under a launcher it is as many ranks as that starts:
//   build/bin/mnist        build/bin/lockstep-run -n 2 build/bin/mnist --epochs 3
#include <cmath>
#include <cstdio>

#include <lockstep/lockstep.h>

#include "loss_log.h"
#include "mnist_options.h"
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
  auto group = dist::init(o.ddp.init());
  check_same_options(group, o.shared());
  auto device = Device::best(group.local_rank());
  if (o.threads > 0) set_num_threads(o.threads);
  manual_seed(o.seed);

  data::Mnist all{o.data, data::Split::train}, test{o.data, data::Split::test};
  data::Subset train{all, data::Range{0, o.train_samples > 0 ? o.train_samples : all.size()}};
  data::Loader loader{
      train,
      {.batch_size = o.batch_size, .shuffle = true, .workers = 1, .seed = o.seed, .shard = group}};

  dist::DistributedDataParallel net{Net{}.to(device), group, o.ddp.options};
  optim::SGD opt{net.parameters(), {.lr = o.lr, .momentum = 0.9}};
  const int64_t steps_an_epoch = (loader.size() + o.accumulation - 1) / o.accumulation;
  optim::CosineAnnealingLR schedule{opt, {.T_max = o.epochs * steps_an_epoch}};

  dist::Checkpoint state{
      group, {{"model", net}, {"optimizer", opt}, {"schedule", schedule}, {"loader", loader}}};
  const bool keep = !o.checkpoint.empty();
  if (keep && dist::load_checkpoint(o.checkpoint, state) && group.is_main())
    std::fprintf(stderr, "%s: going on after step %lld\n", o.checkpoint.c_str(),
                 static_cast<long long>(schedule.steps()));
  dist::Accumulation window{net, group, {.steps = o.accumulation}};
  LossLog losses{o.log_loss, group, schedule.steps()};

  for (int64_t epoch = loader.state().epoch; epoch < o.epochs; ++epoch) {
    auto pass = loader.epoch(epoch);
    const int64_t batches = pass.size(), done = loader.size() - batches;  // of a resumed epoch
    data::Progress progress{str_cat("epoch ", epoch + 1, "/", o.epochs),
                            loader.size(),
                            {.enabled = group.is_main(),
                             .samples_factor = static_cast<double>(group.size()),
                             .initial = done}};
    int64_t left = batches;
    Tensor loss_sum = zeros({}, {.dtype = DType::f64, .device = device});  // since it was last read
    int64_t loss_count = 0;
    for (auto [x, y] : pass) {
      Tensor loss = cross_entropy(net(x.to(device)), y.to(device), {.reduction = Reduction::sum});
      loss_sum += loss.detach();
      loss_count += x.size(0);
      window.backward(loss, x.size(0));
      if (window.step(opt, --left == 0)) {
        schedule.step();
        if (losses) losses.step(schedule.steps(), window.mean_loss());
        if (keep && o.checkpoint_every > 0 && schedule.steps() % o.checkpoint_every == 0)
          dist::save_checkpoint(o.checkpoint, state);
      }
      if (left % 50 == 0) {  // reading the loss waits for the device
        const double mean = loss_sum.item<double>() / static_cast<double>(loss_count);
        LOCKSTEP_CHECK(std::isfinite(mean), Error, "the loss is ", mean, " in epoch ", epoch + 1,
                       " after ", schedule.steps(), " steps; try a smaller --lr than ", o.lr);
        progress.loss(mean, loss_count);
        loss_sum.zero_();
        loss_count = 0;
      }
      progress.step(x.size(0));
    }
    progress.finish();
    if (keep) dist::save_checkpoint(o.checkpoint, state);
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
    return dist::report_failure("mnist", e);
  }
}

// Uses every floor through the umbrella header, and says what came out.
#include <lockstep/lockstep.h>

#include <cstdio>
#include <vector>
using namespace lockstep;

struct Net : nn::Module {
  nn::Linear a{4, 16}, b{16, 1};
  Tensor forward(Tensor x) { return b(relu(a(x))); }
  LOCKSTEP_MODULE(Net, a, b)
};

int main() {
  auto group = dist::init();
  manual_seed(1);
  Tensor x = randn({64, 4}), y = x.sum({1}, true);
  data::Loader loader{data::TensorDataset{x, y},
                      {.batch_size = 16, .shuffle = true, .workers = 1, .shard = group}};
  dist::DistributedDataParallel net{Net{}, group};
  optim::AdamW opt{net.parameters(), {.lr = 0.02, .weight_decay = 0}};
  double first = 0, last = 0;
  for (int epoch = 0; epoch < 30; ++epoch)
    for (auto [bx, by] : loader.epoch(epoch)) {
      opt.zero_grad();
      Tensor loss = mse_loss(net(bx), by);
      loss.backward();
      opt.step();
      last = loss.item<double>();
      if (first == 0) first = last;
    }
  std::printf("loss %.4f -> %.4f\n", first, last);
  return last < 0.1 * first ? 0 : 1;
}

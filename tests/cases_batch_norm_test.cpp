// SyncBatchNorm under DDP: uneven and empty batches normalise as one batch, the gradients of weight and bias
// are averaged once, inputs may be permuted, and what cannot work is an error on every rank. Expected numbers
// are worked by hand, or come from plain batch norm on the whole batch in one process.
#include "cases.h"

#include <lockstep/distributed/sync_batch_norm.h>

namespace {

using namespace cases;

constexpr TensorOptions kF64{.dtype = DType::f64};

/// Rank 0 has [1], rank 1 [2, 3, 6]; a third rank has nothing. The gradient of the output is 1 on rank 0.
void uneven_by_hand(Group g) {
  for (const bool wrapped : {false, true}) {
    nn::BatchNorm1d norm{1, {.eps = 1e-12, .dtype = DType::f64}};
    require(dist::convert_sync_batchnorm(norm, g) == 1, "one module was converted");
    std::optional<DistributedDataParallel<nn::BatchNorm1d>> net;
    if (wrapped) net.emplace(norm, g);
    const std::vector<double> mine = g.rank() == 0   ? std::vector<double>{1}
                                     : g.rank() == 1 ? std::vector<double>{2, 3, 6}
                                                     : std::vector<double>{};
    const auto n = static_cast<int64_t>(mine.size());
    Tensor x = tensor(mine, {n, 1}).requires_grad_();
    const Tensor y = wrapped ? (*net)(x) : norm(x);
    y.backward(full({n, 1}, g.rank() == 0 ? 1 : 0, kF64));
    // Mean 3, biased variance 3.5, unbiased 14 / 3.
    near(norm.running_mean[0].item<double>(), 0.1 * 3, "running_mean");
    near(norm.running_var[0].item<double>(), 0.9 + 0.1 * 14 / 3, "running_var");
    const double deviation = std::sqrt(3.5 + 1e-12);
    const auto dx = x.grad().to_vector<double>();
    for (size_t i = 0; i < mine.size(); ++i) {
      const double h = (mine[i] - 3) / deviation, dy = g.rank() == 0 ? 1 : 0;
      near(y.to_vector<double>()[i], h, "y");
      const double mean_dy_h = -2 / deviation / 4;
      require(std::abs(dx[i] - (dy - 0.25 - h * mean_dy_h) / deviation) < 1e-11, "dx");
    }
    const std::vector<double> rounded = g.rank() == 0
                                            ? std::vector<double>{.248171}
                                            : std::vector<double>{-.209991, -.133631, .095450};
    for (size_t i = 0; i < mine.size(); ++i)
      require(std::abs(dx[i] - rounded[i]) < 1e-6, str_cat("dx: ", dx[i], " for ", rounded[i]));
    // The local gradients of weight and bias; under DDP their mean.
    const double share = wrapped ? 1.0 / g.size() : g.rank() == 0 ? 1 : 0;
    near(norm.bias.grad()[0].item<double>(), share, "bias.grad");
    near(norm.weight.grad()[0].item<double>(), -2 / deviation * share, "weight.grad");
    same_bits(g, norm.running_mean, "running_mean");
    same_bits(g, norm.running_var, "running_var");
  }
}

struct Net : nn::Module {
  nn::BatchNorm2d norm{3, {.dtype = DType::f64}};
  nn::Linear out{6, 2};
  Tensor forward(Tensor x) {  // [B, 2, 3, 1] -> [B, 2]
    return out(tanh(norm(x.permute({0, 2, 1, 3}))).flatten(1));
  }
  LOCKSTEP_MODULE(Net, norm, out)
};
Net make_net() {
  manual_seed(7);
  Net net;
  net.out.to(DType::f64);
  NoGradGuard guard;
  net.norm.weight.copy_(tensor<double>({0.5, 1.5, 2}));
  net.norm.bias.copy_(tensor<double>({1, -1, 0.25}));
  return net;
}

void equals_one_process(Group g) {
  manual_seed(8);
  const Tensor all_x = randn({12, 2, 3, 1}, kF64), all_y = randn({12, 2}, kF64);
  const int64_t n = 12 / g.size();
  for (const bool find : {false, true})
    for (const auto& options : layouts({.find_unused_parameters = find})) {
      Net one = make_net(), many = make_net();
      dist::convert_sync_batchnorm(many, g);
      DistributedDataParallel net{many, g, options};
      optim::SGD opt_one{one.parameters(), {.lr = 0.1, .momentum = 0.9}},
          opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
      for (int step = 0; step < 3; ++step) {
        opt_one.zero_grad();
        opt.zero_grad();
        Tensor x1 = all_x.clone().requires_grad_(),
               x = all_x.narrow(0, g.rank() * n, n).clone().requires_grad_();
        mse_loss(one(x1), all_y).backward();
        mse_loss(net(x), all_y.narrow(0, g.rank() * n, n)).backward();
        const auto a = net.named_parameters(), b = one.named_parameters();
        for (size_t i = 0; i < a.size(); ++i)
          all_near(a[i].second.grad(), b[i].second.grad(), a[i].first + ".grad", 1e-10);
        all_near(x.grad() * (1.0 / g.size()), x1.grad().narrow(0, g.rank() * n, n), "x.grad",
                 1e-10);
        all_near(many.norm.running_var, one.norm.running_var, "running_var");
        all_near(many.norm.running_mean, one.norm.running_mean, "running_mean");
        in_step(g, net);
        opt_one.step();
        opt.step();
      }
    }
}

/// The same number of collectives on every rank, whatever its batch, and none in evaluation.
void collectives(Group g) {
  const auto recorder = recording(g);
  const Group recorded(recorder);
  Net module = make_net();
  dist::convert_sync_batchnorm(module, recorded);
  DistributedDataParallel net{module, recorded};
  for (int step = 0; step < 3; ++step) {
    recorder->log().clear();
    const int64_t n = g.rank() == 0 ? 5 : g.rank() - 1;  // also an empty batch
    net.zero_grad();
    net(ones({n, 2, 3, 1}, kF64) * arange(0, 3).to(DType::f64).view({3, 1})).sum().backward();
    same_bits(g, f64(static_cast<double>(recorder->log().size())), "the number of collectives");
    if (step == 0) continue;  // in which buckets are rebuilt
    recorder->log().clear();
    net.eval();
    NoGradGuard guard;
    net(ones({2, 2, 3, 1}, kF64));
    net.train();
    require(recorder->log().empty(), "an evaluation communicates");
  }
}

/// Fewer than two values on all ranks together.
void too_few(Group g) {
  nn::BatchNorm1d norm{2, {.dtype = DType::f64}};
  dist::convert_sync_batchnorm(norm, g);
  for (int holder = -1; holder < g.size(); ++holder)  // -1: nobody has any
    refuses(g, {"batch"}, [&] { norm(ones({g.rank() == holder ? 1 : 0, 2}, kF64)); });
  const Tensor y = norm(full({1, 2}, g.rank(), kF64));
  require(y.shape() == Shape({1, 2}), "one value on each rank is enough");
}

/// join shadows DDP's traffic, not a layer's.
void inside_join(Group g) {
  const Group own(g.process_group().child());
  Net module = make_net();
  dist::convert_sync_batchnorm(module, own);
  DistributedDataParallel net{module, own};
  std::string text = "no error";
  try {
    net.join([&] {
      for (int i = 0; i < 1 + g.rank(); ++i) net(ones({4, 2, 3, 1}, kF64)).sum().backward();
    });
  } catch (const Error& e) {
    text = e.what();
  }
  require(contains(text, "join: norm is a BatchNorm"), text);
  g.barrier();
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"uneven batches by hand", 2, uneven_by_hand},
      {"uneven batches and an empty one by hand", 3, uneven_by_hand},
      {"permuted inputs on two ranks equal one process", 2, equals_one_process},
      {"permuted inputs on three ranks equal one process", 3, equals_one_process},
      {"the same collectives on every rank", 3, collectives},
      {"fewer than two values on all ranks together", 2, too_few},
      {.name = "SyncBatchNorm inside join", .body = inside_join, .timeout = kDeadline},
  };
  return list;
}

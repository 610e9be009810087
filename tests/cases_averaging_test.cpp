// What gradients are averaged to, and where they live: mean and sum losses against one process, ragged
// batches, gradients that are cleared or assigned in every way, and ranks whose batches touch nothing.
// Expected numbers come from one process, or are worked by hand.
#include "cases.h"

namespace {

using namespace cases;

constexpr TensorOptions kF64{.dtype = DType::f64};

struct Net : nn::Module {
  nn::Linear in{5, 7}, mid{7, 4}, out{4, 3};
  Tensor forward(Tensor x) { return out(tanh(mid(tanh(in(x))))); }  // [B, 5] -> [B, 3]
  LOCKSTEP_MODULE(Net, in, mid, out)
};
Net make_net() {
  manual_seed(2);
  return Net{}.to(DType::f64);
}

/// One bucket; one per parameter; and some in which parameters do not come out even.
std::vector<DistributedDataParallelOptions> all_layouts(DistributedDataParallelOptions o = {}) {
  auto all = layouts(o);
  o.bucket_cap_mb = 250.0 / (1 << 20), o.first_bucket_mb = 30.0 / (1 << 20);
  all.push_back(o);
  return all;
}

// ---- mean and sum ----

void mean_and_sum(Group g) {
  manual_seed(1);
  const int64_t n = 24 / g.size();
  const Tensor x = randn({24, 5}, kF64), y = randn({24, 3}, kF64);
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < 24; ++i) labels.push_back(i * 7 % 3);
  const Tensor label = tensor(labels);
  const auto mine = [&](const Tensor& t) { return t.narrow(0, g.rank() * n, n); };
  for (const Reduction reduction : {Reduction::mean, Reduction::sum})
    for (const bool classify : {false, true})
      for (const auto& options : all_layouts()) {
        const auto loss = [&](const Tensor& p, const Tensor& target) {
          return classify ? cross_entropy(p, target, {.reduction = reduction})
                          : mse_loss(p, target, reduction);
        };
        const Tensor& target = classify ? label : y;
        Net one = make_net();
        loss(one(x), target).backward();
        DistributedDataParallel net{make_net(), g, options};
        for (int step = 0; step < 2; ++step) {
          net.zero_grad();
          loss(net(mine(x)), mine(target)).backward();
          const auto a = net.parameters(), b = one.parameters();
          const double factor = reduction == Reduction::mean ? 1 : g.size();
          for (size_t i = 0; i < a.size(); ++i)
            all_near(a[i].grad() * factor, b[i].grad(), str_cat("gradient ", i));
          in_step(g, net);
        }
      }
}

/// Ragged micro-batches, ignored targets and a short last window, against whole batches.
std::vector<Tensor> train_ragged(const Group& g, const DistributedDataParallelOptions& options,
                                 bool whole, std::vector<double>& losses) {
  manual_seed(3);
  const Tensor x = randn({40, 5}, kF64);
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < 40; ++i) labels.push_back(i % 4 == 1 ? -100 : i * 5 % 3);
  const Tensor label = tensor(labels);
  DistributedDataParallel net{make_net(), g, options};
  optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  dist::Accumulation acc{net, g, {.steps = whole ? 1 : 2}};
  // By window, rank and micro-batch: 15, 13 and 12 samples, the last window has one micro-batch.
  const std::vector<std::vector<std::vector<int64_t>>> sizes{
      {{4, 1}, {2, 2}, {1, 5}}, {{1, 1}, {5, 2}, {0, 4}}, {{7}, {3}, {2}}};
  int64_t first = 0;
  for (const auto& window : sizes) {
    int64_t total = 0;
    for (size_t r = 0; r < 3; ++r)
      for (const int64_t n : window[r]) {
        if (!whole && static_cast<int>(r) == g.rank()) {
          const Tensor target = label.narrow(0, first + total, n);
          int64_t count = 0;
          for (const int64_t l : target.to_vector<int64_t>()) count += l >= 0;
          acc.backward(cross_entropy(net(x.narrow(0, first + total, n)), target,
                                     {.reduction = Reduction::sum}),
                       count);
          if (acc.step(opt)) losses.push_back(acc.mean_loss());
        }
        total += n;
      }
    if (whole) {
      const Tensor target = label.narrow(0, first, total);
      int64_t count = 0;
      for (const int64_t l : target.to_vector<int64_t>()) count += l >= 0;
      acc.backward(
          cross_entropy(net(x.narrow(0, first, total)), target, {.reduction = Reduction::sum}),
          count);
      if (acc.step(opt)) losses.push_back(acc.mean_loss());
    }
    first += total;
  }
  if (acc.step(opt, true)) losses.push_back(acc.mean_loss());
  return net.parameters();
}

void ragged(Group g) {
  std::vector<double> want_losses;
  const auto want = train_ragged(Group(), {}, true, want_losses);
  for (const auto& options : all_layouts()) {
    std::vector<double> losses;
    const auto got = train_ragged(g, options, false, losses);
    require(losses.size() == 3 && want_losses.size() == 3, "three windows");
    for (size_t i = 0; i < 3; ++i) near(losses[i], want_losses[i], "the loss of a window");
    for (size_t i = 0; i < want.size(); ++i) {
      all_near(got[i], want[i], str_cat("parameter ", i));
      same_bits(g, got[i], str_cat("parameter ", i));
    }
  }
}

// ---- clearing and assigning ----

void every_way_of_clearing(Group g) {
  manual_seed(1);
  const int64_t n = 12 / g.size();
  const Tensor x = randn({12, 5}, kF64), y = randn({12, 3}, kF64);
  const Tensor my_x = x.narrow(0, g.rank() * n, n), my_y = y.narrow(0, g.rank() * n, n);
  for (const auto& options : all_layouts()) {
    Net one = make_net();
    DistributedDataParallel net{make_net(), g, options};
    optim::SGD opt{net.parameters(), {.lr = 0.1, .momentum = 0.9}},
        opt_one{one.parameters(), {.lr = 0.1, .momentum = 0.9}};
    for (int step = 0; step < 5 * 4; ++step) {
      const int way = step % 4;
      // 2: a clone of the last gradient counts as accumulated; 3: nothing is cleared.
      auto clear = [way](optim::Optimizer& o, const std::vector<Tensor>& params) {
        if (way < 2) o.zero_grad(way == 0);
        for (const Tensor& p : params)
          if (way == 2) p.set_grad(p.grad().clone());
      };
      clear(opt, net.parameters());
      clear(opt_one, one.parameters());
      mse_loss(net(my_x), my_y).backward();
      mse_loss(one(x), y).backward();
      const auto a = net.parameters(), b = one.parameters();
      for (size_t i = 0; i < a.size(); ++i)
        all_near(a[i].grad(), b[i].grad(), str_cat("step ", step, ", gradient ", i));
      // Gradients are the bucket: those of one bucket lie side by side.
      size_t bytes = 0;
      std::vector<const char*> at;
      for (const Tensor& p : a) {
        bytes += static_cast<size_t>(p.numel()) * 8 + 64;
        at.push_back(static_cast<const char*>(p.grad().data_ptr()));
      }
      const auto [lowest, highest] = std::minmax_element(at.begin(), at.end());
      if (net.stats().buckets.size() == 1)
        require(static_cast<size_t>(*highest - *lowest) < bytes, "a gradient is not in the bucket");
      require(net.stats().gradient_bytes <= bytes, "gradient memory is more than the buckets");
      in_step(g, net);
      opt.step();
      opt_one.step();
    }
  }
}

/// Memory is counted per process.
void gradient_memory(Group g) {
  constexpr int64_t kLargest = 512 * 512 * 4, kSlack = 1 << 17;
  for (const bool assign : {false, true})
    for (const auto& options : layouts()) {
      manual_seed(1);
      nn::Sequential module{nn::Linear{512, 512}, nn::Linear{512, 512}, nn::Linear{512, 512},
                            nn::Linear{512, 256}};
      DistributedDataParallel net{module, g, options};
      const Tensor x = ones({2, 512});
      for (int step = 0; step < 4; ++step) {
        net.zero_grad();
        const auto before = memory_stats();
        reset_peak_memory();
        net(x).square().mean().backward();
        const auto after = memory_stats();
        if (step < 2) continue;  // buckets are rebuilt in the first
        require(after.active_bytes - before.active_bytes <= kSlack,
                str_cat("memory beside the buckets: ", after.active_bytes - before.active_bytes));
        require(after.peak_bytes - before.active_bytes <= kLargest + kSlack,
                str_cat("peak above one gradient: ", after.peak_bytes - before.active_bytes));
        if (!assign) continue;
        for (const Tensor& p : net.parameters()) p.set_grad(p.grad().clone());
        net(x).square().mean().backward();
        require(memory_stats().active_bytes - before.active_bytes <= kSlack,
                "an adopted gradient is kept twice");
      }
    }
}

// ---- batches that touch nothing ----

struct Embedding : nn::Module {  // index 0 is padding
  nn::Parameter table{zeros({6, 2}, kF64)};
  Tensor forward(const std::vector<int64_t>& batch) {
    Tensor chosen = zeros({static_cast<int64_t>(batch.size()), 6}, kF64);
    for (size_t i = 0; i < batch.size(); ++i)
      if (batch[i] != 0) chosen[static_cast<int64_t>(i)][batch[i]].fill_(1);
    return matmul(chosen, table);  // [B, 2]
  }
  LOCKSTEP_MODULE(Embedding, table)
};

void padding_only(Group g) {
  // Rank 2, where there is one, has an empty batch.
  const std::vector<std::vector<int64_t>> batches{{0, 0, 0, 0}, {3, 5}, {}};
  for (const bool find : {false, true})
    for (const auto& options : layouts({.find_unused_parameters = find})) {
      DistributedDataParallel net{Embedding{}, g, options};
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        (net(batches[static_cast<size_t>(g.rank())]) * 4.0).sum().backward();
        const Tensor grad = net.module().table.grad();  // [6, 2]
        for (int64_t i = 0; i < 6; ++i)
          for (const double v : grad[i].to_vector<double>())
            near(v, i == 3 || i == 5 ? 4.0 / g.size() : 0, str_cat("row ", i));
        in_step(g, net);
      }
    }
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"mean and sum losses on two ranks", 2, mean_and_sum},
      {"mean and sum losses on three ranks", 3, mean_and_sum},
      {"mean and sum losses on four ranks", 4, mean_and_sum},
      {"ragged micro-batches and ignored targets", 3, ragged},
      {"every way of clearing gradients", 2, every_way_of_clearing},
      {"every way of clearing gradients on three ranks", 3, every_way_of_clearing},
      {.name = "memory of gradients", .body = gradient_memory, .threads = false},
      {"a batch of padding", 2, padding_only},
      {"a batch of padding and an empty one", 3, padding_only},
  };
  return list;
}

// The claim that everything distributed rests on, as a function: W ranks that split each batch end
// with the weights of one process that saw it whole. Ranks are delayed at random, which must change
// no bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include <lockstep/lockstep.h>

namespace equality {

using namespace lockstep;

/// Five layers, two of which share their weight.
struct Net : nn::Module {
  nn::Linear a{20, 32}, b{32, 24}, c{24, 24}, d{24, 24}, e{24, 6};
  Net() { d.weight = c.weight; }
  Tensor forward(Tensor x) {  // x: [B, 20]
    x = tanh(b(tanh(a(x))));  //    [B, 24]
    x = relu(d(tanh(c(x))));  //    [B, 24]
    return e(x);              //    [B, 6]
  }
  LOCKSTEP_MODULE(Net, a, b, c, d, e)
};

struct Setup {
  DType dtype = DType::f64;
  int epochs = 3;
  int64_t samples = 48, global_batch = 12;
  int most_delay_ms = 0;  // per rank and hook
  unsigned delay_seed = 0;
};

struct Outcome {
  std::vector<double> weights;
  bool overlapped = false;  // some first bucket was complete before backward's last node ran
  size_t buckets = 0;
};

/// Trains and returns this rank's weights. The group may be of any size; of one, it is the
/// reference.
inline Outcome train(const dist::Group& group, const Setup& s) {
  manual_seed(3);
  Tensor x = randn({s.samples, 20}).to(s.dtype), y = randn({s.samples, 6}).to(s.dtype);
  data::Loader loader{
      data::TensorDataset{x, y},
      {.batch_size = s.global_batch / group.size(), .shuffle = true, .seed = 5, .shard = group}};
  Net module;
  module.to(s.dtype);
  // 1 KiB and 4 KiB: at least four buckets.
  dist::DistributedDataParallel net{
      module, group, {.bucket_cap_mb = 4.0 / 1024, .first_bucket_mb = 1.0 / 1024}};
  optim::SGD opt{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
  std::mt19937 random(s.delay_seed * 100 + static_cast<unsigned>(group.rank()));
  if (s.most_delay_ms > 0)
    for (Tensor& p : net.parameters())
      p.register_post_accumulate_grad_hook([&](const Tensor&) {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(random() % static_cast<unsigned>(s.most_delay_ms + 1)));
      });
  Outcome out;
  for (int epoch = 0; epoch < s.epochs; ++epoch)
    for (auto [bx, by] : loader.epoch(epoch)) {
      opt.zero_grad();
      mse_loss(net(bx), by).backward();
      opt.step();
      const dist::DdpStats stats = net.stats();
      out.buckets = stats.buckets.size();
      // The last node, the first layer's, brings the last two gradients: earlier than those two is
      // before it.
      if (out.buckets > 0 && stats.buckets[0].completed_after >= 0 &&
          stats.buckets[0].completed_after <= stats.arrivals - 3)
        out.overlapped = true;
    }
  for (const Tensor& p : net.parameters())
    for (double v : p.to_vector<double>()) out.weights.push_back(v);
  return out;
}

/// max |a - b| / max |b|
inline double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0, scale = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    most = std::isfinite(a[i]) ? std::max(most, std::abs(a[i] - b[i])) : INFINITY;
    scale = std::max(scale, std::abs(b[i]));
  }
  return most / scale;
}

}  // namespace equality

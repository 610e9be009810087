// CheckpointProgram: a small training program with everything that a checkpoint keeps, and what is
// compared of it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>

#include "ranks.h"

namespace checkpoints {

using namespace lockstep;
using ranks::require;

inline void on_ranks(int size, const std::function<void(dist::Group)>& f) {
  dist::run_local(size, f, {.timeout = std::chrono::seconds(30 * ranks::kPatience)});
}

struct Net : nn::Module {
  nn::Linear a{6, 16};
  nn::BatchNorm1d norm{16};
  nn::Dropout dropout{0.3};
  nn::Linear b{16, 3};
  Tensor forward(Tensor x) {              // x: [B, 6]
    return b(dropout(relu(norm(a(x)))));  //    [B, 3]
  }
  LOCKSTEP_MODULE(Net, a, norm, dropout, b)
};

/// Everything a small training program has: 78 samples in global batches of 16, so 5 an epoch.
struct Program {
  dist::Group group;
  dist::DistributedDataParallel<Net> net;
  std::unique_ptr<optim::Optimizer> opt;
  optim::LRScheduler schedule;
  data::Loader<data::TensorDataset<2>> loader;
  double last_loss = 0;
  int steps = 0;
  std::map<int, std::vector<int64_t>> seen = {};  // samples of this rank, by step

  static data::TensorDataset<2> dataset() {
    const Tensor x = arange(0, 78 * 6, 1, {.dtype = DType::f32}).view({78, 6});
    return data::TensorDataset{x.detach().clone(), arange(0, 78)};
  }
  static Net made(uint64_t seed) {
    manual_seed(seed);
    return Net{};
  }
  static std::unique_ptr<optim::Optimizer> optimizer(const std::string& kind,
                                                     std::vector<Tensor> parameters) {
    if (kind == "adamw")
      return std::make_unique<optim::AdamW>(std::move(parameters),
                                            optim::AdamWOptions{.lr = 0.02, .amsgrad = true});
    return std::make_unique<optim::SGD>(
        std::move(parameters),
        optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .dampening = 0.1, .weight_decay = 1e-3});
  }

  Program(dist::Group g, const std::string& kind, uint64_t seed)
      : group(std::move(g)),
        net(made(seed), group),
        opt(optimizer(kind, net.parameters())),
        schedule(
            optim::SequentialLR(*opt,
                                {optim::LinearLR{*opt, {.start_factor = 0.2, .total_iters = 4}},
                                 optim::CosineAnnealingLR{*opt, {.T_max = 9}}},
                                {4})),
        loader(dataset(), {.batch_size = 16 / group.size(),
                           .shuffle = true,
                           .workers = 1,
                           .seed = 11,
                           .shard = group}) {}

  dist::Checkpoint checkpoint() {
    return {group,
            {{"model", net},
             {"optimizer", *opt},
             {"schedule", schedule},
             {"loader", loader},
             {"steps", steps},
             {"last_loss", last_loss}}};
  }
  /// Until `to` steps are done in all.
  void train(int to) {
    for (int64_t epoch = loader.state().epoch; steps < to; ++epoch)
      for (auto [x, y] : loader.epoch(epoch)) {
        seen[steps + 1] = y.to_vector<int64_t>();
        opt->zero_grad();
        Tensor target = tanh((y.to(DType::f32) - 39) / 20.0).view({-1, 1}).expand({y.size(0), 3});
        Tensor loss = mse_loss(net(tanh((x - 234) / 80.0)), target);
        loss.backward();
        opt->step();
        schedule.step();
        last_loss = loss.item<double>();
        if (++steps == to) return;
      }
  }
};

using Bits = std::map<std::string, std::vector<double>>;

/// All that a checkpoint keeps of a run on this rank; with `own_loss` this rank's last loss too.
inline Bits bits(const dist::Checkpoint& run, bool own_loss = false) {
  Bits all;
  for (const dist::CheckpointPart& part : run.parts)
    if (own_loss || part.name() != "last_loss")
      for (const auto& [name, t] : part.state())
        all[part.name() + "." + name] = t.to_vector<double>();
  const GeneratorState& g = default_generator().state();
  all["generator"] = {static_cast<double>(g.seed), static_cast<double>(g.offset),
                      static_cast<double>(g.stream)};
  return all;
}

inline std::string first_difference(const Bits& a, const Bits& b) {
  for (const auto& [name, values] : a)
    if (!b.contains(name) || b.at(name) != values) return name;
  return a.size() == b.size() ? "" : "their number";
}

}  // namespace checkpoints

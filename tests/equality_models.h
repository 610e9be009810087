// Three small models and one training loop for them, in two forms: on W ranks under
// DistributedDataParallel, and on one process that sees every rank's samples at once. A side branch,
// used by some ranks in some micro-batches, and a branch that nobody uses make parameters unused.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/lockstep.h>

namespace equality {

using namespace lockstep;

struct Mlp : nn::Module {
  nn::Linear a{20, 24}, b{24, 16}, c{16, 4};
  Tensor forward(Tensor x) { return c(tanh(b(relu(a(x))))); }  // [B, 20] to [B, 4]
  static Shape sample_shape() { return {20}; }
  LOCKSTEP_MODULE(Mlp, a, b, c)
};

struct Cnn : nn::Module {
  nn::Conv2d conv1{1, 4, 3}, conv2{4, 6, 3};
  nn::BatchNorm2d bn1{4}, bn2{6};
  nn::Linear fc{24, 4};
  Tensor forward(Tensor x) {               // x: [B, 1, 10, 10]
    x = relu(bn1(conv1(x)));               //    [B, 4, 8, 8]
    x = max_pool2d(x, 2);                  //    [B, 4, 4, 4]
    return fc(tanh(bn2(conv2(x))).flatten(1));  // [B, 6, 2, 2], then [B, 4]
  }
  static Shape sample_shape() { return {1, 10, 10}; }
  LOCKSTEP_MODULE(Cnn, conv1, bn1, conv2, bn2, fc)
};

struct Block : nn::Module {  // one block of a transformer: attention with two heads, then an MLP
  nn::LayerNorm ln1{8}, ln2{8};
  nn::Linear qkv{8, 24}, out{8, 8}, up{8, 16}, down{16, 8}, head{8, 4};
  Tensor forward(Tensor x) {  // x: [B, 5, 8]
    const int64_t B = x.size(0), T = x.size(1);
    Tensor h = qkv(ln1(x)).reshape({B, T, 3, 2, 4}).permute({2, 0, 3, 1, 4});  // [3, B, 2, T, 4]
    Tensor scores = matmul(h[0], h[1].transpose(2, 3)) * 0.5;                  // [B, 2, T, T]
    Tensor mixed = matmul(softmax(scores, -1), h[2]);                          // [B, 2, T, 4]
    x = x + out(mixed.transpose(1, 2).reshape({B, T, 8}));                     // [B, T, 8]
    x = x + down(gelu(up(ln2(x))));                                            // [B, T, 8]
    return head(x.mean({1}));                                                  // [B, 4]
  }
  static Shape sample_shape() { return {5, 8}; }
  LOCKSTEP_MODULE(Block, ln1, qkv, out, ln2, up, down, head)
};

/// A model with a branch that only some use, and one that nobody does.
template <class Core>
struct Branched : nn::Module {
  Core core;
  nn::Linear side{Core::sample_shape().numel(), 4}, never{4, 4};
  /// x: [B, ...]. The side branch runs where `use_side`; `mask`, [B, 1], says for which samples.
  Tensor forward(const Tensor& x, bool use_side, const Tensor& mask) {
    Tensor y = core(x);  // [B, 4]
    if (use_side) y = y + (mask.defined() ? side(x.flatten(1)) * mask : side(x.flatten(1)));
    return y;
  }
  LOCKSTEP_MODULE(Branched, core, side, never)
};

enum class Unused { none, found, fixed };  // found: find_unused_parameters; fixed: static_graph
enum class Recipe { sgd_f64, sgd_f32, adamw_f32 };

struct Config {
  int model = 0;  // of kModels
  int accumulation = 1;
  Unused unused = Unused::none;
  Recipe recipe = Recipe::sgd_f64;
  double cap_mb = 25;

  DType dtype() const { return recipe == Recipe::sgd_f64 ? DType::f64 : DType::f32; }
  /// Whether a rank's micro-batch goes through the side branch.
  bool uses_side(int rank, int step, int micro) const {
    if (unused == Unused::none) return true;
    return unused == Unused::fixed ? rank == 0 : (rank + step + micro) % 2 == 0;
  }
  std::string text() const;
};
inline constexpr const char* kModels[] = {"mlp", "cnn", "transformer"};
inline constexpr int kBatch = 12, kSteps = 10;

inline std::string Config::text() const {
  return str_cat(kModels[model], ", accumulation ", accumulation, ", unused ",
                 static_cast<int>(unused), ", recipe ", static_cast<int>(recipe), ", cap ", cap_mb,
                 " MiB");
}

/// A parameter of the branches trains only where it is used somewhere.
inline std::vector<Tensor> weights_of(const nn::Module& m) {
  std::vector<Tensor> weights;
  for (const auto& [name, t] : m.state_dict())
    if (is_floating(t.dtype())) weights.push_back(t.detach().to(DType::f64).reshape({-1}));
  return weights;
}

/// `logical` ranks' samples: on a group of that size each rank's own, on a group of one all of them.
template <class Core>
Tensor train_model(const Config& c, const dist::Group& group, int logical, unsigned delay_seed) {
  manual_seed(7);
  Branched<Core> module;
  module.to(c.dtype());
  Shape shape = Core::sample_shape();
  shape.insert(0, kBatch);
  std::mt19937 random(delay_seed * 100 + static_cast<unsigned>(group.rank()));
  if (group.size() > 1) dist::convert_sync_batchnorm(module, group);
  dist::DistributedDataParallel net{module,
                                    group,
                                    {.bucket_cap_mb = c.cap_mb,
                                     .first_bucket_mb = c.cap_mb / 4,
                                     .find_unused_parameters = c.unused == Unused::found,
                                     .static_graph = c.unused == Unused::fixed}};
  if (c.unused == Unused::none) module.never.requires_grad_(false);
  for (Tensor& p : net.parameters())
    if (group.size() > 1 && p.requires_grad())
      p.register_post_accumulate_grad_hook([&random](const Tensor&) {
        if (random() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      });
  std::unique_ptr<optim::Optimizer> opt;
  if (c.recipe == Recipe::adamw_f32)
    opt = std::make_unique<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = 1e-3});
  else
    opt = std::make_unique<optim::SGD>(
        net.parameters(), optim::SGDOptions{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01});

  const int first = group.rank() * kBatch / group.size(), rows = kBatch / group.size();
  for (int step = 0; step < kSteps; ++step) {
    opt->zero_grad();
    for (int micro = 0; micro < c.accumulation; ++micro) {
      const Tensor all_x = randn(shape).to(c.dtype()), all_y = randn({kBatch, 4}).to(c.dtype());
      const Tensor x = all_x.narrow(0, first, rows), y = all_y.narrow(0, first, rows);
      bool use = false;
      std::vector<double> mask;
      for (int s = first; s < first + rows; ++s) {
        mask.push_back(c.uses_side(s * logical / kBatch, step, micro));
        use |= mask.back() != 0;
      }
      const bool whole = group.size() == logical;
      const auto local = net.no_sync(micro + 1 < c.accumulation);
      const Tensor out =
          net(x, use, whole ? Tensor() : tensor(mask).reshape({rows, 1}).to(c.dtype()));
      (mse_loss(out, y) / c.accumulation).backward();
    }
    opt->step();
  }
  return cat(weights_of(module));
}

inline Tensor train_config(const Config& c, const dist::Group& group, int logical,
                           unsigned delay_seed = 0) {
  switch (c.model) {
    case 0:
      return train_model<Mlp>(c, group, logical, delay_seed);
    case 1:
      return train_model<Cnn>(c, group, logical, delay_seed);
    default:
      return train_model<Block>(c, group, logical, delay_seed);
  }
}

inline std::vector<Config> all_configs() {
  std::vector<Config> all;
  for (int model : {0, 1, 2})
    for (int accumulation : {1, 3})
      for (Unused unused : {Unused::none, Unused::found, Unused::fixed})
        for (Recipe recipe : {Recipe::sgd_f64, Recipe::sgd_f32, Recipe::adamw_f32})
          for (double cap : {1.0 / 1024, 25.0})
            all.push_back({model, accumulation, unused, recipe, cap});
  return all;
}

/// A seeded sample in which every pair of choices meets.
inline std::vector<Config> pairwise_configs(unsigned seed) {
  std::vector<Config> all = all_configs(), sample;
  std::shuffle(all.begin(), all.end(), std::mt19937(seed));
  const auto choices = [](const Config& c) {
    return std::vector<int>{c.model, c.accumulation, static_cast<int>(c.unused),
                            static_cast<int>(c.recipe), c.cap_mb < 1};
  };
  std::vector<std::vector<int>> met;
  for (const Config& c : all) {
    const std::vector<int> mine = choices(c);
    bool brings = false;
    for (int i = 0; i < 5; ++i)
      for (int j = 0; j < i; ++j) {
        const std::vector<int> pair{i, j, mine[static_cast<size_t>(i)], mine[static_cast<size_t>(j)]};
        if (std::find(met.begin(), met.end(), pair) != met.end()) continue;
        met.push_back(pair);
        brings = true;
      }
    if (brings) sample.push_back(c);
  }
  return sample;
}

}  // namespace equality

#include "models.h"

namespace lockstep::bench {
namespace {

/// forward, backward and SGD with momentum on one fixed random batch.
template <class Net>
std::function<void()> step_of(std::shared_ptr<Net> net, Tensor x, Tensor y) {
  auto opt = std::make_shared<optim::SGD>(net->parameters(),
                                          optim::SGDOptions{.lr = 0.01, .momentum = 0.9});
  return [=] {
    opt->zero_grad();
    cross_entropy((*net)(x), y).backward();
    opt->step();
  };
}
template <class M>
std::function<void()> training_step(M net, Tensor x, Tensor y) {
  return step_of(std::make_shared<M>(std::move(net)), x, y);
}
template <class M>
RankStep rank_step(M net, Tensor x, Tensor y, const dist::Group& group) {
  auto ddp = std::make_shared<dist::DistributedDataParallel<M>>(std::move(net), group);
  size_t bytes = 0;
  for (const Tensor& p : ddp->parameters())
    bytes += static_cast<size_t>(p.numel()) * size_of(p.dtype());
  return {step_of(ddp, x, y), [ddp] { return ddp->stats(); }, bytes};
}

nn::Sequential small_mlp() {
  return nn::Sequential{nn::Linear{784, 128}, nn::ReLU{}, nn::Linear{128, 10}};
}
nn::Sequential wide_mlp() {
  return nn::Sequential{nn::Linear{784, 512}, nn::ReLU{}, nn::Linear{512, 512}, nn::ReLU{},
                        nn::Linear{512, 10}};
}
Tensor labels(int64_t batch) { return randint(0, 10, {batch}); }

/// A linear layer's products: forward, dW and, behind the first layer, dx.
void add_linear(std::vector<Product>& list, int64_t batch, int64_t in, int64_t out, bool first) {
  list.push_back({.kind = Product::gemm, .tb = true, .m = batch, .n = out, .k = in});
  list.push_back({.kind = Product::gemm, .ta = true, .m = out, .n = in, .k = batch});
  if (!first) list.push_back({.kind = Product::gemm, .m = batch, .n = in, .k = out});
}
std::vector<Product> mlp_products(int64_t batch, std::vector<int64_t> sizes) {
  std::vector<Product> list;
  for (size_t i = 0; i + 1 < sizes.size(); ++i)
    add_linear(list, batch, sizes[i], sizes[i + 1], i == 0);
  return list;
}
std::vector<Product> cnn_products(int64_t batch) {
  std::vector<Product> list;
  for (auto kind : {Product::conv_forward, Product::conv_weights})
    list.push_back({.kind = kind, .batch = batch, .in = 1, .out = 32, .size = 28});
  for (auto kind : {Product::conv_forward, Product::conv_weights, Product::conv_data})
    list.push_back({.kind = kind, .batch = batch, .in = 32, .out = 64, .size = 26});
  add_linear(list, batch, 9216, 128, false);
  add_linear(list, batch, 128, 10, false);
  return list;
}

}  // namespace

std::vector<Case> cases() {
  return {
      {"mlp_784_128_10_bs64", 1.3,
       [] {
         return training_step(small_mlp(), rand({64, 784}), labels(64));
       },
       mlp_products(64, {784, 128, 10})},
      {"mlp_784_128_10_bs256", 1.15,
       [] {
         return training_step(small_mlp(), rand({256, 784}), labels(256));
       },
       mlp_products(256, {784, 128, 10})},
      {"mlp_784_512_512_10_bs128", 1.2,
       [] {
         return training_step(wide_mlp(), rand({128, 784}), labels(128));
       },
       mlp_products(128, {784, 512, 512, 10})},
      {"cnn_bs128", 1.35,
       [] {
         return training_step(Cnn(), rand({128, 1, 28, 28}), labels(128));
       },
       cnn_products(128)},
  };
}

RankStep ddp_step(const std::string& name, int64_t global_batch, const dist::Group& group) {
  const int64_t batch = global_batch / group.size();
  if (name == "cnn") return rank_step(Cnn(), rand({batch, 1, 28, 28}), labels(batch), group);
  return rank_step(wide_mlp(), rand({batch, 784}), labels(batch), group);
}

std::function<void()> plain_step(const std::string& name, int64_t batch) {
  if (name == "cnn") return training_step(Cnn(), rand({batch, 1, 28, 28}), labels(batch));
  return training_step(wide_mlp(), rand({batch, 784}), labels(batch));
}

}  // namespace lockstep::bench

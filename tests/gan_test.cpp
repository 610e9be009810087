// Adversarial training with both networks wrapped: a DCGAN loop, where one backward goes through two wrappers,
// and a WGAN-GP step, where it goes through a gradient. W ranks equal one process.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

constexpr int kBatch = 12;

struct Generator_ : nn::Module {
  nn::Linear fc{6, 36};
  nn::BatchNorm2d bn{4};
  nn::Conv2d conv{4, 1, 2};
  Tensor forward(Tensor z) {  // z: [B, 6]
    z = fc(z).reshape({z.size(0), 4, 3, 3});
    return tanh(conv(relu(bn(z))));  // [B, 1, 2, 2]
  }
  LOCKSTEP_MODULE(Generator_, fc, bn, conv)
};

struct Critic : nn::Module {
  nn::Conv2d conv{1, 5, 2, {.bias = false}};  // the norm behind it takes any bias away
  nn::BatchNorm2d bn{5};
  nn::Linear fc{5, 1};
  Tensor forward(Tensor x) {                             // x: [B, 1, 2, 2]
    return fc(leaky_relu(bn(conv(x)), 0.2).flatten(1));  // [B, 1]
  }
  LOCKSTEP_MODULE(Critic, conv, bn, fc)
};

struct Smooth : nn::Module {  // without batch norm, for a penalty per sample
  nn::Linear a{4, 16}, b{16, 1};
  Tensor forward(Tensor x) { return b(tanh(a(x))); }  // [B, 4] to [B, 1]
  LOCKSTEP_MODULE(Smooth, a, b)
};
struct Source : nn::Module {
  nn::Linear a{3, 4};
  Tensor forward(Tensor z) { return tanh(a(z)); }  // [B, 3] to [B, 4]
  LOCKSTEP_MODULE(Source, a)
};

Tensor rows(const Tensor& all, const Group& g) {
  const int64_t n = kBatch / g.size();
  return all.narrow(0, g.rank() * n, n);
}
Tensor noise(Shape shape) { return randn(shape).to(DType::f64); }

std::vector<double> values(const nn::Module& a, const nn::Module& b) {
  std::vector<double> all;
  for (const nn::Module* m : {&a, &b})
    for (const auto& [name, t] : m->state_dict())
      if (t.dtype() == DType::f64)
        for (const double v : t.to_vector<double>()) all.push_back(v);
  return all;
}

/// Least squares in place of cross entropy; PyTorch's DCGAN example otherwise.
std::vector<double> dcgan(const Group& g) {
  manual_seed(11);
  Generator_ made;
  Critic judge;
  made.to(DType::f64);
  judge.to(DType::f64);
  if (g.size() > 1) {
    dist::convert_sync_batchnorm(made, g);
    dist::convert_sync_batchnorm(judge, g);
  }
  const dist::DistributedDataParallelOptions small{.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4};
  DistributedDataParallel G{made, g, small};
  DistributedDataParallel D{judge, g, small};
  optim::Adam opt_g{G.parameters(), {.lr = 1e-2}}, opt_d{D.parameters(), {.lr = 1e-2}};
  for (int step = 0; step < 5; ++step) {
    const Tensor real = rows(noise({kBatch, 1, 2, 2}), g), z = rows(noise({kBatch, 6}), g);
    const Tensor one = ones({real.size(0), 1}, {.dtype = DType::f64}), zero = zeros_like(one);
    opt_d.zero_grad();
    mse_loss(D(real), one).backward();
    const Tensor fake = G(z);
    mse_loss(D(fake.detach()), zero).backward();
    opt_d.step();
    opt_g.zero_grad();
    mse_loss(D(fake), one).backward();
    opt_g.step();
  }
  return values(made, judge);
}

std::vector<double> wgan_gp(const Group& g) {
  manual_seed(12);
  Source source;
  Smooth smooth;
  source.to(DType::f64);
  smooth.to(DType::f64);
  DistributedDataParallel G{source, g};
  DistributedDataParallel D{smooth, g};
  optim::SGD opt_g{G.parameters(), {.lr = 0.05}}, opt_d{D.parameters(), {.lr = 0.05}};
  for (int step = 0; step < 5; ++step) {
    const Tensor real = rows(noise({kBatch, 4}), g), z = rows(noise({kBatch, 3}), g);
    const Tensor mix = rows(noise({kBatch, 1}), g);
    const Tensor fake = G(z);
    Tensor between = (real * mix + fake.detach() * (1.0 - mix)).detach().requires_grad_();
    opt_d.zero_grad();
    const Tensor slope =
        autograd::grad({D(between).sum()}, {between}, {}, {.create_graph = true})[0];  // [B, 4]
    const Tensor penalty = (sqrt(slope.square().sum({1})) - 1.0).square().mean();
    (D(fake.detach()).mean() - D(real).mean() + 10.0 * penalty).backward();
    opt_d.step();
    opt_g.zero_grad();
    (-D(fake).mean()).backward();
    opt_g.step();
  }
  return values(source, smooth);
}

void compare(const std::function<std::vector<double>(const Group&)>& train) {
  const std::vector<double> want = train(Group());
  for (const int size : {2, 3}) {
    CAPTURE(size);
    CHECK_NOTHROW(run_local(
        size,
        [&](Group g) {
          const std::vector<double> got = train(g);
          double scale = 0;
          for (const double w : want) scale = std::max(scale, std::abs(w));
          for (size_t i = 0; i < want.size(); ++i)
            require(std::abs(got[i] - want[i]) <= 1e-12 * scale,
                    str_cat("weight ", i, " is ", got[i], ", on one process ", want[i]));
          equal_on_all(g, tensor(got), "the weights");
        },
        kQuick));
  }
}

}  // namespace

TEST_CASE("a DCGAN loop equals one process") { compare(dcgan); }
TEST_CASE("WGAN-GP, a gradient penalty, equals one process") { compare(wgan_gp); }

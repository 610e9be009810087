// The training steps that are timed: models, random data and optimizer of the shared work list.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>

namespace lockstep::bench {

struct Cnn : nn::Module {
  nn::Conv2d conv1{1, 32, 3}, conv2{32, 64, 3};
  nn::Linear fc1{9216, 128}, fc2{128, 10};
  Tensor forward(Tensor x) {              // x: [B, 1, 28, 28]
    x = relu(conv1(x));                   //    [B, 32, 26, 26]
    x = max_pool2d(relu(conv2(x)), 2);    //    [B, 64, 12, 12]
    return fc2(relu(fc1(x.flatten(1))));  //    [B, 10]
  }
  LOCKSTEP_MODULE(Cnn, conv1, conv2, fc1, fc2)
};

/// One product of a model's step: y[m, n] = a[m, k] b[k, n], or a 3x3 convolution.
struct Product {
  enum Kind { gemm, conv_forward, conv_weights, conv_data } kind;
  bool ta = false, tb = false;
  int64_t m = 0, n = 0, k = 0;  // gemm
  int64_t batch = 0, in = 0, out = 0,
          size = 0;  // convolution: images, channels, channels, height = width
  double flops() const {
    return kind == gemm ? 2.0 * static_cast<double>(m * n * k)
                        : 2.0 * static_cast<double>(batch * in * out * 9 * (size - 2) * (size - 2));
  }
};

struct Case {
  std::string name;
  double budget;  // step over bare products
  std::function<std::function<void()>()>
      make_step;  // builds model and data, returns one training step
  std::vector<Product> products;
};

std::vector<Case> cases();

/// One rank's training step under DistributedDataParallel.
struct RankStep {
  std::function<void()> step;
  std::function<dist::DdpStats()> stats;
  size_t parameter_bytes;
};
/// The global batch is split evenly.
RankStep ddp_step(const std::string& name, int64_t global_batch, const dist::Group& group);
/// The same model without the wrapper.
std::function<void()> plain_step(const std::string& name, int64_t batch);

}  // namespace lockstep::bench

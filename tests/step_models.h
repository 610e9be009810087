// The models whose training steps are made again (replay_test.cpp) and made on a second device
// (late_device_test.cpp): those of the demos, and one with what they have not.
#pragma once

#include <lockstep/lockstep.h>

namespace step_models {

using namespace lockstep;

struct Mlp : nn::Module {
  nn::Sequential layers{nn::Flatten{}, nn::Linear{784, 128}, nn::ReLU{}, nn::Linear{128, 10}};
  Tensor forward(Tensor x) { return layers(x); }
  LOCKSTEP_MODULE(Mlp, layers)
};
struct Cnn : nn::Module {
  nn::Conv2d conv1{1, 32, 3}, conv2{32, 64, 3};
  nn::Linear fc1{9216, 128}, fc2{128, 10, {.bias = false}};
  Tensor forward(Tensor x) {
    x = max_pool2d(relu(conv2(relu(conv1(x)))), 2);
    return fc2(relu(fc1(x.flatten(1))));
  }
  LOCKSTEP_MODULE(Cnn, conv1, conv2, fc1, fc2)
};
/// Random numbers, statistics, and state beside the parameters.
struct Mixed : nn::Module {
  nn::Conv2d conv{1, 4, 3, {.stride = 2}};
  nn::BatchNorm2d norm{4, {.momentum = std::nullopt}};
  nn::Dropout drop{0.3};
  nn::LayerNorm last{{16}};
  nn::Linear fc1{676, 16}, fc2{16, 10};
  Tensor forward(Tensor x) {
    x = drop(gelu(norm(conv(x)))).flatten(1);
    return fc2(last(fc1(x)) + rand({16}, {.device = x.device()}));
  }
  LOCKSTEP_MODULE(Mixed, conv, norm, drop, last, fc1, fc2)
};

}  // namespace step_models

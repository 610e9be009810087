// Every layer against PyTorch: output, gradients of inputs and parameters, and buffers afterwards;
// then what golden values cannot show.
#include <doctest/doctest.h>

#include <lockstep/nn/nn.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/random.h>

#include "golden.h"

using namespace lockstep;

namespace {

const Golden& golden() {
  static const Golden g("layers.safetensors");
  return g;
}

/// Runs one case of tests/golden/make_layers.py in f64 and in f32.
template <class M>
void check(const std::string& name, M module, bool eval = false, int forwards = 1) {
  CAPTURE(name);
  for (const DType dtype : {DType::f64, DType::f32}) {
    const double tolerance = dtype == DType::f64 ? 1e-12 : 1e-5;
    module.to(dtype);
    module.load_state_dict(golden().under(name + ".state."));
    module.train(!eval);
    module.zero_grad();
    const Tensor x = golden()[name + ".x0"].to(dtype).clone().requires_grad_();
    Tensor y;
    for (int i = 0; i < forwards; ++i) y = module(x);
    CHECK(difference(y, golden()[name + ".y"]) <= tolerance);
    (y * golden()[name + ".w"].to(dtype)).sum().backward();
    CHECK(difference(x.grad(), golden()[name + ".dx0"]) <= tolerance);
    for (auto& [key, p] : module.named_parameters())
      CHECK(difference(p.grad(), golden()[name + ".grad." + key]) <= 10 * tolerance);
    for (auto& [key, b] : module.named_buffers())
      CHECK(difference(b, golden()[name + ".after." + key]) <= tolerance);
  }
}

/// The losses take two tensors.
template <class Loss>
void check_loss(const std::string& name, Loss loss) {
  CAPTURE(name);
  const Tensor x = golden()[name + ".x0"].clone().requires_grad_();
  Tensor target = golden()[name + ".x1"];
  if (target.is_floating_point()) target = target.clone().requires_grad_();
  const Tensor y = loss(x, target);
  CHECK(difference(y, golden()[name + ".y"]) <= 1e-12);
  (y * golden()[name + ".w"]).sum().backward();
  CHECK(difference(x.grad(), golden()[name + ".dx0"]) <= 1e-12);
  if (target.is_floating_point())
    CHECK(difference(target.grad(), golden()[name + ".dx1"]) <= 1e-12);
}

}  // namespace

TEST_CASE("layers equal PyTorch's") {
  check("linear", nn::Linear{5, 3});
  check("linear_no_bias", nn::Linear{5, 3, {.bias = false}});
  check("conv2d", nn::Conv2d{2, 4, 3});
  check("conv2d_options",
        nn::Conv2d{
            4,
            6,
            {3, 2},
            {.stride = {2, 1}, .padding = {1, 2}, .dilation = {1, 2}, .groups = 2, .bias = false}});
  check("batch_norm1d", nn::BatchNorm1d{3}, false, 2);
  check("batch_norm1d_3d", nn::BatchNorm1d{3, {.momentum = std::nullopt}}, false, 2);
  check("batch_norm2d", nn::BatchNorm2d{3, {.eps = 1e-3, .momentum = 0.2}});
  check("batch_norm2d_plain", nn::BatchNorm2d{3, {.affine = false, .track_running_stats = false}},
        true);
  check("batch_norm2d_eval", nn::BatchNorm2d{3}, true);
  check("layer_norm", nn::LayerNorm{6});
  check("layer_norm_2d", nn::LayerNorm{{4, 6}, {.eps = 1e-2}});
  check("max_pool2d", nn::MaxPool2d{2});
  check("max_pool2d_options", nn::MaxPool2d{3, {.stride = 2, .padding = 1}});
  check("flatten", nn::Flatten{});
  check("flatten_some", nn::Flatten{0, 1});
  check("relu", nn::ReLU{});
  check("gelu", nn::GELU{});
  check("silu", nn::SiLU{});
  check("sigmoid", nn::Sigmoid{});
  check("tanh", nn::Tanh{});
  check("leaky_relu", nn::LeakyReLU{0.2});
  check("softmax", nn::Softmax{1});
  check("log_softmax", nn::LogSoftmax{-1});
  check("identity", nn::Identity{});
  check("dropout_eval", nn::Dropout{0.7}, true);
  check("sequential",
        nn::Sequential{nn::Linear{5, 7}, nn::ReLU{}, nn::Sequential{nn::Linear{7, 4}, nn::Tanh{}},
                       nn::Linear{4, 2}});
}

TEST_CASE("losses equal PyTorch's") {
  check_loss("cross_entropy", nn::CrossEntropyLoss{});
  check_loss("cross_entropy_options",
             nn::CrossEntropyLoss{
                 {.reduction = Reduction::sum, .ignore_index = 1, .label_smoothing = 0.1}});
  check_loss("mse", nn::MSELoss{});
  check_loss("mse_none", nn::MSELoss{Reduction::none});
}

TEST_CASE("dropout drops in training alone") {
  nn::Dropout drop{0.25};
  const Tensor x = ones({100, 100});
  manual_seed(5);
  const Tensor y = drop(x);
  manual_seed(5);
  CHECK(difference(drop(x), y) == 0);
  CHECK(difference(drop(x), y) > 0);
  int zeros = 0;
  for (float v : y.to_vector<float>()) {
    const bool scaled = std::abs(v - 4.0f / 3) < 1e-6f;
    CHECK_MESSAGE((v == 0 || scaled), v);
    zeros += v == 0;
  }
  CHECK(zeros > 2300);
  CHECK(zeros < 2700);
  drop.eval();
  CHECK(difference(drop(x), x) == 0);
  CHECK_THROWS_AS(nn::Dropout{1.5}, ValueError);
}

TEST_CASE("Sequential: access, growth, cloning and names") {
  nn::Sequential net{nn::Linear{2, 3}, nn::ReLU{}};
  net.push_back(nn::Sequential{nn::Linear{3, 1}});
  CHECK(net.size() == 3);
  CHECK(net.at<nn::Linear>(0).out_features() == 3);
  CHECK_THROWS_AS(net.at<nn::Linear>(1), ValueError);
  CHECK_THROWS_AS(net[3], IndexError);
  std::vector<std::string> names;
  for (auto& [name, p] : net.named_parameters()) names.push_back(name);
  CHECK(names == std::vector<std::string>{"0.weight", "0.bias", "2.0.weight", "2.0.bias"});
  net.eval();
  nn::Sequential copy = net.clone();
  CHECK(!copy.is_training());
  CHECK(!copy.at<nn::Linear>(0).weight.is_same(net.at<nn::Linear>(0).weight));
  const Tensor x = randn({4, 2});
  CHECK(difference(copy(x), net(x)) == 0);
  CHECK(net.share().at<nn::Linear>(0).weight.is_same(net.at<nn::Linear>(0).weight));
  nn::Sequential moved = std::move(copy);
  CHECK(difference(moved(x), net(x)) == 0);
}

TEST_CASE("Sequential's fused Linear and ReLU is the two of them, forward and backward") {
  nn::Linear a{20, 30}, b{30, 10};
  nn::Sequential net{a.share(), nn::ReLU{}, b.share(), nn::ReLU{}};
  const Tensor x = randn({7, 20}).requires_grad_(), same = x.detach().clone().requires_grad_();
  const Tensor y = relu(b(relu(a(x))));
  y.square().sum().backward();
  const Tensor da = a.weight.grad().clone(), db = b.bias.grad().clone();
  net.zero_grad();
  const Tensor z = net(same);
  CHECK(std::string(z.node()->name()) != "relu");
  CHECK(difference(z, y) < 1e-6);
  z.square().sum().backward();
  CHECK(difference(a.weight.grad(), da) < 1e-5);
  CHECK(difference(b.bias.grad(), db) < 1e-5);
  CHECK(difference(same.grad(), x.grad()) < 1e-5);
}

TEST_CASE("wrong inputs and options are refused by name") {
  CHECK_THROWS_AS(nn::Linear(3, -1), ValueError);
  CHECK_THROWS_AS(nn::Conv2d(3, 4, 3, {.groups = 2}), ValueError);
  CHECK_THROWS_AS(nn::BatchNorm2d{4}(zeros({2, 4})), ShapeError);
  CHECK_THROWS_AS(nn::BatchNorm1d{4}(zeros({2, 4, 3, 3})), ShapeError);
  CHECK_THROWS_AS(nn::LayerNorm{4}(zeros({2, 5})), ShapeError);
  CHECK_THROWS_AS(nn::LayerNorm(Shape{}), ValueError);
}

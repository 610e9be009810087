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

TEST_CASE("Dropout: it drops in training alone") {
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

TEST_CASE("layers: wrong inputs and options are refused by name") {
  CHECK_THROWS_AS(nn::Linear(-1, 3), ValueError);
  CHECK_THROWS_AS(nn::Linear(3, -1), ValueError);
  CHECK_THROWS_AS(nn::Conv2d(3, 4, 3, {.groups = 2}), ValueError);
  CHECK_THROWS_AS(nn::BatchNorm2d{4}(zeros({2, 4})), ShapeError);
  CHECK_THROWS_AS(nn::BatchNorm1d{4}(zeros({2, 4, 3, 3})), ShapeError);
  CHECK_THROWS_AS(nn::LayerNorm{4}(zeros({2, 5})), ShapeError);
  CHECK_THROWS_AS(nn::LayerNorm(Shape{}), ValueError);
}

TEST_CASE("Dropout: p = 0 is the identity, p = 1 gives zeros and zero gradients") {
  const Tensor values = randn({5, 7});
  for (const double p : {0.0, 1.0}) {
    nn::Dropout drop{p};
    const Tensor x = values.clone().requires_grad_(), y = drop(x);
    CHECK(difference(y, values * (1 - p)) == 0);
    y.sum().backward();
    CHECK(difference(x.grad(), full({5, 7}, 1 - p)) == 0);
    drop.eval();
    CHECK(difference(drop(x), values) == 0);
  }
  CHECK(nn::Dropout{0.5}(zeros({0, 3})).shape() == Shape{0, 3});
}

TEST_CASE("Linear: without inputs it is its bias, without outputs it has no elements") {
  nn::Linear none{0, 5}, plain{0, 5, {.bias = false}}, nowhere{3, 0};
  nn::init::uniform_(none.bias, 1, 2);
  const Tensor y = none(zeros({2, 0}));
  CHECK(difference(y, none.bias.detach().expand({2, 5})) == 0);
  y.sum().backward();
  CHECK(difference(none.bias.grad(), full({5}, 2)) == 0);
  CHECK(none.weight.grad().shape() == Shape{5, 0});
  CHECK(difference(plain(zeros({2, 0})), zeros({2, 5})) == 0);
  const Tensor x = ones({2, 3}).requires_grad_(), z = nowhere(x);
  CHECK(z.shape() == Shape{2, 0});
  z.sum().backward();
  CHECK(difference(x.grad(), zeros({2, 3})) == 0);
  nn::Sequential chain{nn::Linear{3, 0}, nn::ReLU{}, nn::Linear{0, 2}};
  CHECK(difference(chain(x), chain.at<nn::Linear>(2).bias.detach().expand({2, 2})) == 0);
}

TEST_CASE("layers: a batch of no samples gives no results, and zero gradients") {
  const auto check = [](auto layer, Shape in, Shape out, bool train = true) {
    CAPTURE(layer.to_string());
    layer.train(train);
    const Tensor x = zeros(in).requires_grad_(), y = layer(x);
    CHECK(y.shape() == out);
    y.sum().backward();
    CHECK(x.grad().shape() == in);
    for (auto& [name, p] : layer.named_parameters())
      CHECK(difference(p.grad(), zeros(p.shape())) == 0);
  };
  check(nn::Linear{3, 2}, {0, 3}, {0, 2});
  check(nn::Linear{3, 2}, {4, 0, 3}, {4, 0, 2});
  check(nn::BatchNorm1d{3}, {0, 3}, {0, 3}, false);
  check(nn::BatchNorm2d{3}, {0, 3, 2, 2}, {0, 3, 2, 2}, false);
  check(nn::LayerNorm{3}, {0, 3}, {0, 3});
  check(nn::MaxPool2d{2}, {0, 1, 4, 4}, {0, 1, 2, 2});
  check(nn::Flatten{}, {0, 3, 4}, {0, 12});
  check(nn::Dropout{0.5}, {0, 3}, {0, 3});
  check(nn::Softmax{1}, {0, 3}, {0, 3});
  check(nn::LogSoftmax{0}, {0, 3}, {0, 3});
  check(nn::GELU{}, {0}, {0});
  check(nn::Sequential{nn::Linear{3, 2}, nn::ReLU{}}, {0, 3}, {0, 2});
}

TEST_CASE("BatchNorm: its plain average counts neither a refused batch nor an empty one") {
  nn::BatchNorm1d norm{1, {.momentum = std::nullopt}};
  CHECK_THROWS_AS(norm(ones({1, 1})), ShapeError);
  CHECK_THROWS_AS(norm(ones({4, 2})), ShapeError);
  norm(zeros({0, 1}));
  CHECK(norm.num_batches_tracked.item<int64_t>() == 0);
  norm(tensor<float>({0, 2}, {2, 1}));
  CHECK(norm.running_mean.item<double>() == 1);
  norm(zeros({0, 1}));
  norm(tensor<float>({4, 6}, {2, 1}));
  CHECK(norm.running_mean.item<double>() == 3);
  CHECK(norm.running_var.item<double>() == 2);
  CHECK(norm.num_batches_tracked.item<int64_t>() == 2);
}

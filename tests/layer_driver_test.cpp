// Every layer against the op that it stands for, on the same data: results, gradients and buffers
// in training and evaluation, f32 and f64; then its state dict, clone, share, conversion and
// freezing. What the ops compute is op_driver_test.cpp's.
#include <doctest/doctest.h>

#include <map>

#include <lockstep/autograd/grad.h>
#include <lockstep/nn/nn.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops.h>

using namespace lockstep;

namespace {

/// Parameters and buffers by name.
using State = std::map<std::string, Tensor>;

/// Copies that nothing else shares, on which gradients are collected as on the module's own.
State copy_of(const nn::Module& module) {
  State state;
  for (const auto& [name, t] : module.state_dict()) state[name] = t.detach().clone();
  for (const auto& [name, t] : module.named_parameters())
    if (t.requires_grad()) state[name].requires_grad_();
  return state;
}
/// The tensor of that name, or an undefined one.
Tensor find(const State& state, const std::string& name) {
  const auto found = state.find(name);
  return found == state.end() ? Tensor() : found->second;
}

bool same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || (a.shape() == b.shape() && a.dtype() == b.dtype() &&
                          a.to_vector<double>() == b.to_vector<double>());
}
void check_same_state(const nn::Module& module, const State& state) {
  CHECK(module.state_dict().size() == state.size());
  for (const auto& entry : module.state_dict()) {
    const std::string& name = entry.first;
    CAPTURE(name);
    CHECK(same(entry.second, find(state, name)));
  }
}

/// Other values everywhere, so that equality afterwards means that something was copied.
void spoil(nn::Module& module) {
  const NoGradGuard guard;
  for (auto& [name, t] : module.state_dict()) Tensor(t).add_(1);
}

Tensor run(nn::Module& module, const Tensor& x) {
  manual_seed(3);  // dropout
  return module.forward_any(x);
}

/// What a layer computes, as an op: of its state, x and the mode.
using Functional = std::function<Tensor(const State& state, const Tensor& x, bool training)>;

/// One pass of the module and of the op from equal states; both states move on alike.
void check_pass(nn::Module& module, const Shape& shape, DType dtype, const Functional& op) {
  const State state = copy_of(module);
  module.zero_grad();
  const Tensor x = randn(shape, {.dtype = dtype}).requires_grad_();
  const Tensor same_x = x.detach().clone().requires_grad_();
  const Tensor y = run(module, x);
  manual_seed(3);
  const Tensor want = op(state, same_x, module.is_training());
  CHECK(same(y, want));
  CHECK(same(x, same_x));
  const Tensor dy = randn(y.shape(), {.dtype = dtype});
  y.backward(dy);
  want.backward(dy);
  CHECK(same(x.grad(), same_x.grad()));
  for (const auto& parameter : module.named_parameters()) {
    const std::string& name = parameter.first;
    const Tensor grad = parameter.second.grad();
    CAPTURE(name);
    CHECK(grad.defined());
    CHECK(same(grad, find(state, name).grad()));
  }
  check_same_state(module, state);
}

/// Every check of one layer. M is its class, since clone() and to() are the class's own.
template <class M>
void check_layer(const std::string& name, M module, const Shape& shape, const Functional& op) {
  CAPTURE(name);
  manual_seed(11);
  for (DType dtype : {DType::f32, DType::f64}) {
    CAPTURE(dtype);
    const State before = copy_of(module);
    module.to(dtype);
    for (const auto& [key, t] : module.state_dict())
      CHECK(same(
          t, is_floating(t.dtype()) ? find(before, key).detach().to(dtype) : find(before, key)));
    for (bool training : {true, true, false}) {
      module.train(training);
      CHECK(module.is_training() == training);
      check_pass(module, shape, dtype, op);
    }

    // A clone has the state and the mode, and nothing in common; share() has everything.
    module.zero_grad();
    const Tensor x = randn(shape, {.dtype = dtype});
    M copy = module.clone(), shared = module.share();
    CHECK(!copy.is_training());
    const Tensor y = run(module, x);
    CHECK(same(run(copy, x), y));
    CHECK(same(run(shared, x), y));
    const State kept = copy_of(module);
    spoil(copy);
    check_same_state(module, kept);
    for (size_t i = 0; i < module.state_dict().size(); ++i)
      CHECK(shared.state_dict()[i].second.data_ptr() == module.state_dict()[i].second.data_ptr());

    // The state dict brings the copy back.
    copy.load_state_dict(module.state_dict());
    check_same_state(copy, kept);
    CHECK(same(run(copy, x), y));

    // Frozen: the gradient of x alone, and the same one.
    const Tensor a = x.clone().requires_grad_(), b = x.clone().requires_grad_();
    run(module, a).sum().backward();
    copy.requires_grad_(false);
    run(copy, b).sum().backward();
    CHECK(same(a.grad(), b.grad()));
    for (const Tensor& p : copy.parameters()) CHECK(!p.grad().defined());
  }
}

}  // namespace

TEST_CASE("layers: Linear is linear") {
  const Functional op = [](const State& s, const Tensor& x, bool) {
    return linear(x, find(s, "weight"), find(s, "bias"));
  };
  check_layer("Linear", nn::Linear{5, 3}, {4, 5}, op);
  check_layer("Linear without bias", nn::Linear{5, 3, {.bias = false}}, {4, 5}, op);
  check_layer("Linear of 3-d", nn::Linear{5, 3}, {2, 4, 5}, op);
  check_layer("Linear of 1-d", nn::Linear{5, 3}, {5}, op);
  check_layer("Linear of no rows", nn::Linear{5, 3}, {0, 5}, op);
  check_layer("Linear without inputs", nn::Linear{0, 3}, {4, 0}, op);
  check_layer("Linear without outputs", nn::Linear{5, 0}, {4, 5}, op);
}

TEST_CASE("layers: Conv2d is conv2d") {
  const auto op = [](Conv2dOptions o) -> Functional {
    return [=](const State& s, const Tensor& x, bool) {
      return conv2d(x, find(s, "weight"), find(s, "bias"), o);
    };
  };
  check_layer("Conv2d", nn::Conv2d{2, 4, 3}, {2, 2, 5, 6}, op({}));
  check_layer("Conv2d of no images", nn::Conv2d{2, 4, 3}, {0, 2, 5, 6}, op({}));
  check_layer("Conv2d with options",
              nn::Conv2d{4, 6, {3, 2}, {.stride = {2, 1}, .padding = {1, 2}, .groups = 2}},
              {2, 4, 5, 6}, op({.stride = {2, 1}, .padding = {1, 2}, .groups = 2}));
  check_layer("Conv2d, dilated, without bias", nn::Conv2d{2, 3, 2, {.dilation = 2, .bias = false}},
              {2, 2, 5, 6}, op({.dilation = 2}));
}

TEST_CASE("layers: BatchNorm is batch_norm") {
  const auto op = [](double eps, std::optional<double> momentum) -> Functional {
    return [=](const State& s, const Tensor& x, bool training) {
      double m = momentum.value_or(0);
      if (Tensor batches = find(s, "num_batches_tracked"); batches.defined() && training) {
        batches.add_(1);
        if (!momentum) m = 1 / batches.item<double>();
      }
      return batch_norm(x, find(s, "running_mean"), find(s, "running_var"), find(s, "weight"),
                        find(s, "bias"), training, m, eps);
    };
  };
  check_layer("BatchNorm1d", nn::BatchNorm1d{3}, {4, 3}, op(1e-5, 0.1));
  check_layer("BatchNorm1d of 3-d, plain average", nn::BatchNorm1d{3, {.momentum = std::nullopt}},
              {4, 3, 2}, op(1e-5, std::nullopt));
  check_layer("BatchNorm2d", nn::BatchNorm2d{3, {.eps = 1e-3, .momentum = 0.4}}, {2, 3, 2, 2},
              op(1e-3, 0.4));
  check_layer("BatchNorm2d without weight", nn::BatchNorm2d{3, {.affine = false}}, {2, 3, 2, 2},
              op(1e-5, 0.1));
  check_layer("BatchNorm2d without statistics", nn::BatchNorm2d{3, {.track_running_stats = false}},
              {2, 3, 2, 2}, op(1e-5, 0.1));
}

TEST_CASE("layers: LayerNorm is layer_norm") {
  const auto op = [](Shape shape, double eps) -> Functional {
    return [=](const State& s, const Tensor& x, bool) {
      return layer_norm(x, shape, find(s, "weight"), find(s, "bias"), eps);
    };
  };
  check_layer("LayerNorm", nn::LayerNorm{6}, {2, 3, 6}, op({6}, 1e-5));
  check_layer("LayerNorm of no rows", nn::LayerNorm{6}, {0, 6}, op({6}, 1e-5));
  check_layer("LayerNorm of two dimensions", nn::LayerNorm{{4, 6}, {.eps = 1e-2}}, {2, 4, 6},
              op({4, 6}, 1e-2));
  check_layer("LayerNorm without bias", nn::LayerNorm{6, {.bias = false}}, {2, 6}, op({6}, 1e-5));
  check_layer("LayerNorm without weight", nn::LayerNorm{6, {.elementwise_affine = false}}, {2, 6},
              op({6}, 1e-5));
}

TEST_CASE("layers: those without parameters are their ops") {
  using Op = Tensor (*)(Tensor);
  const auto plain = [](Op f) -> Functional {
    return [=](const State&, const Tensor& x, bool) { return f(x); };
  };
  check_layer("Identity", nn::Identity{}, {3, 4}, plain([](Tensor x) { return x; }));
  check_layer("ReLU", nn::ReLU{}, {3, 4}, plain(relu));
  check_layer("GELU", nn::GELU{}, {3, 4}, plain(gelu));
  check_layer("SiLU", nn::SiLU{}, {3, 4}, plain(silu));
  check_layer("Sigmoid", nn::Sigmoid{}, {3, 4}, plain(sigmoid));
  check_layer("Tanh", nn::Tanh{}, {3, 4}, plain(tanh));
  check_layer("LeakyReLU", nn::LeakyReLU{0.3}, {3, 4},
              plain([](Tensor x) { return leaky_relu(x, 0.3); }));
  check_layer("Softmax", nn::Softmax{0}, {3, 4}, plain([](Tensor x) { return softmax(x, 0); }));
  check_layer("LogSoftmax", nn::LogSoftmax{-1}, {3, 4},
              plain([](Tensor x) { return log_softmax(x, -1); }));
  check_layer("Flatten", nn::Flatten{}, {2, 3, 4}, plain([](Tensor x) { return x.flatten(1); }));
  check_layer("Flatten of some", nn::Flatten{0, 1}, {2, 3, 4},
              plain([](Tensor x) { return x.flatten(0, 1); }));
  check_layer("MaxPool2d", nn::MaxPool2d{2}, {2, 3, 4, 6},
              plain([](Tensor x) { return max_pool2d(x, 2); }));
  check_layer("MaxPool2d of no images", nn::MaxPool2d{2}, {0, 3, 4, 6},
              plain([](Tensor x) { return max_pool2d(x, 2); }));
  check_layer("MaxPool2d with options", nn::MaxPool2d{3, {.stride = 2, .padding = 1}}, {2, 3, 4, 6},
              plain([](Tensor x) { return max_pool2d(x, 3, {.stride = 2, .padding = 1}); }));
  check_layer(
      "Dropout", nn::Dropout{0.4}, {30, 4},
      [](const State&, const Tensor& x, bool training) { return dropout(x, 0.4, training); });
}

TEST_CASE("layers: Sequential is its modules one after the other") {
  check_layer("Sequential",
              nn::Sequential{nn::Linear{5, 7}, nn::ReLU{}, nn::Dropout{0.3},
                             nn::Sequential{nn::Linear{7, 4}, nn::Tanh{}}, nn::BatchNorm1d{4}},
              {6, 5}, [](const State& s, const Tensor& x, bool training) {
                Tensor h = linear(x, find(s, "0.weight"), find(s, "0.bias"), Activation::relu);
                h = dropout(h, 0.3, training);
                h = tanh(linear(h, find(s, "3.0.weight"), find(s, "3.0.bias")));
                if (training) Tensor(find(s, "4.num_batches_tracked")).add_(1);
                return batch_norm(h, find(s, "4.running_mean"), find(s, "4.running_var"),
                                  find(s, "4.weight"), find(s, "4.bias"), training);
              });
}

TEST_CASE("layers: losses are their ops") {
  manual_seed(5);
  for (Reduction r : {Reduction::mean, Reduction::sum, Reduction::none})
    for (DType dtype : {DType::f32, DType::f64}) {
      const auto check = [&](auto&& loss, auto&& op, const Tensor& target) {
        const Tensor x = randn({6, 4}, {.dtype = dtype}).requires_grad_();
        const Tensor same_x = x.detach().clone().requires_grad_();
        const Tensor y = loss(x, target), want = op(same_x, target);
        CHECK(same(y, want));
        y.backward(ones_like(y));
        want.backward(ones_like(want));
        CHECK(same(x.grad(), same_x.grad()));
        CHECK(loss.parameters().empty());
      };
      const CrossEntropyOptions options{.reduction = r, .ignore_index = 1, .label_smoothing = 0.2};
      check(
          nn::CrossEntropyLoss{options},
          [&](const Tensor& x, const Tensor& t) { return cross_entropy(x, t, options); },
          randint(0, 4, {6}));
      check(
          nn::MSELoss{r}, [&](const Tensor& x, const Tensor& t) { return mse_loss(x, t, r); },
          randn({6, 4}, {.dtype = dtype}));
    }
}

// SavedTensorHooks: what ops save for backward goes through pack, and backward reads what unpack
// returns.
#include <doctest/doctest.h>

#include <any>
#include <cmath>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/lockstep.h>

using namespace lockstep;
using autograd::gradgradcheck;
using autograd::SavedTensorHooks;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Names = std::vector<std::string>;
using Tensors = std::vector<Tensor>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }
Tensor same(const Tensor& t) { return t; }
Tensor copy(const Tensor& t) { return t.clone(); }

/// A convolutional net whose ops save inputs, outputs, and what they keep.
struct Net : nn::Module {
  nn::Conv2d conv{2, 4, 3, {.padding = 1}};
  nn::BatchNorm2d bn{4};
  nn::MaxPool2d pool{2};
  nn::Linear hidden{16, 8};
  nn::LayerNorm norm{8};
  nn::Linear out{8, 3};
  Tensor forward(const Tensor& x) {
    Tensor h = pool(relu(bn(conv(x))));
    h = hidden(h.flatten(1));
    h = norm(h * sigmoid(h)).transpose(0, 1);
    tanh_(h);
    return out(h.transpose(0, 1));
  }
  LOCKSTEP_MODULE(Net, conv, bn, pool, hidden, norm, out)
};

}  // namespace

TEST_CASE("offloaded to copies, a whole net has the same gradients to the bit") {
  manual_seed(3);
  Net net;
  const Tensor x = randn({5, 2, 4, 4}), y = tensor(std::vector<int64_t>{0, 1, 2, 1, 0});
  const auto gradients = [&] {
    net.zero_grad();
    cross_entropy(net(x), y).backward();
    std::vector<std::vector<float>> all;
    for (const Tensor& p : net.parameters()) all.push_back(p.grad().to_vector<float>());
    return all;
  };
  const auto expected = gradients();
  int packed = 0, unpacked = 0;
  std::set<std::string> ops;
  std::set<int> roles;
  const SavedTensorHooks guard{[&](const Tensor& t, const SavedFrom& from) {
                                 ++packed;
                                 ops.insert(from.op);
                                 roles.insert(from.role);
                                 CHECK_FALSE(is_grad_enabled());
                                 CHECK_FALSE(t.requires_grad());
                                 return t.clone();
                               },
                               [&](const Tensor& t) {
                                 ++unpacked;
                                 return t.clone();
                               }};
  CHECK(gradients() == expected);
  CHECK(packed >= 15);
  CHECK(unpacked >= packed);
  CHECK(roles.size() == 3);
  for (const char* op : {"conv2d", "batch_norm", "relu", "max_pool2d", "linear", "mul", "sigmoid",
                         "layer_norm", "tanh", "cross_entropy"})
    CHECK_MESSAGE(ops.count(op) == 1, op);
}

TEST_CASE("pack is told which tensor of which op it gets") {
  const Tensor x = leaf({1, 2}), c = tensor(V{3, 4});
  Names names;
  const SavedTensorHooks guard{
      [&](const Tensor& t, const SavedFrom& from) {
        names.push_back(str_cat(from.op, " ", from, from.is_leaf ? " leaf" : ""));
        return t;
      },
      same};
  const Tensor y = exp(x * c) * x;
  CHECK(names == Names{"mul input 1", "exp output 0", "mul input 0", "mul input 1 leaf"});
  y.sum().backward();
  CHECK(values(x.grad())[0] == doctest::Approx(std::exp(3.0) * 4));
}

TEST_CASE("backward reads what unpack returns; what was saved is neither kept nor checked") {
  const Tensor x = leaf({1, 2});
  Tensor h, y;
  {
    const SavedTensorHooks guard{copy, same};
    h = exp(x);
    y = h * 1.0;
  }
  h.mul_(3.0);  // exp saved it, in a copy
  CHECK(h.storage().use_count() == 1);
  (y + h).sum().backward();
  CHECK(values(x.grad())[1] == doctest::Approx(4 * std::exp(2.0)));
  x.set_grad({});
  {
    const SavedTensorHooks guard{[](const Tensor&) { return 7; },
                                 [](int n) { return full({2}, n, {.dtype = DType::f64}); }};
    y = exp(x);
  }
  y.sum().backward();
  CHECK(values(x.grad()) == V{7, 7});
}

TEST_CASE("hooks nest, the innermost alone is called, and those of other threads are not") {
  const Tensor x = leaf({1, 2});
  std::string log;
  const auto logging = [&](char c) {
    return [&log, c](const Tensor& t) {
      log += c;
      return t;
    };
  };
  const auto unlogging = [&](char c) {
    return [&log, c](const Tensor& t) {
      log += c;
      return t;
    };
  };
  Tensor a, b, c, d;
  {
    const SavedTensorHooks outer{logging('o'), unlogging('O')};
    a = exp(x);
    {
      const SavedTensorHooks inner{logging('i'), unlogging('I')};
      b = exp(x);
      std::thread([&] { c = exp(x); }).join();
    }
    d = exp(x);
  }
  exp(x);
  CHECK(log == "oio");
  log.clear();
  b.sum().backward();
  CHECK(log == "I");
  (a + c + d).sum().backward();
  CHECK(log == "IOO");
}

TEST_CASE("what was packed lives as long as the graph does") {
  const Tensor x = leaf({1, 2});
  const auto alive = std::make_shared<int>();
  Tensor y;
  {
    const SavedTensorHooks guard{
        [alive](const Tensor& t) { return std::make_pair(t.clone(), alive); },
        [](const std::pair<Tensor, std::shared_ptr<int>>& p) { return p.first; }};
    y = exp(x) * x;
  }
  CHECK(alive.use_count() ==
        5);  // here, in pack itself, and for exp's output and both of mul's inputs
  y.sum().backward({}, {.retain_graph = true});
  const V once = values(x.grad());
  CHECK(alive.use_count() == 5);
  y.sum().backward();
  CHECK(values(x.grad()) == V{2 * once[0], 2 * once[1]});
  CHECK(alive.use_count() == 1);  // the hooks went too
  CHECK_THROWS_WITH_AS(y.sum().backward(), Contains("freed by an earlier backward"), AutogradError);
}

TEST_CASE("derivatives of any order pass through what was unpacked to the original input") {
  const auto f = [](const Tensors& in) {
    const SavedTensorHooks guard{copy, copy};
    Tensor h = matmul(exp(in[0]), in[1]) * in[0];
    h.mul_(in[0]);
    return softmax(h, 1) * tanh(h);
  };
  const Tensor a = tensor(V{0.1, 0.4, -0.3, 0.2}, {2, 2}).requires_grad_(),
               b = tensor(V{0.5, -0.4, 0.3, 0.6}, {2, 2}).requires_grad_();
  CHECK_NOTHROW(gradgradcheck(f, {a, b}));

  const Tensor x = leaf({1, 2});  // what unpack computes has a graph of its own, which is left
  Tensor y;
  {
    const SavedTensorHooks guard{same, [&](const Tensor& t) {
                                   EnableGradGuard on;
                                   return t * (x / x.detach());
                                 }};
    y = (x * x * x).sum();
  }
  const Tensor g = autograd::grad({y}, {x}, {}, {.create_graph = true})[0];
  g.sum().backward();
  CHECK(values(x.grad()) == V{6, 12});
}

TEST_CASE("unpack runs in backward's grad mode") {
  const Tensor x = leaf({1, 2});
  std::vector<bool> modes;
  Tensor y;
  {
    const SavedTensorHooks guard{same, [&](const Tensor& t) {
                                   modes.push_back(is_grad_enabled());
                                   return t;
                                 }};
    y = exp(x).sum();
  }
  y.backward({}, {.retain_graph = true});
  y.backward({}, {.create_graph = true});
  CHECK(modes == std::vector<bool>{false, true});
}

TEST_CASE(
    "hooks that throw: the exception reaches the caller, and the next op finds them as before") {
  const Tensor x = leaf({1, 2});
  bool fails = true;
  int calls = 0;
  Tensor y;
  {
    const SavedTensorHooks guard{[&](const Tensor& t) {
                                   ++calls;
                                   if (fails) throw std::runtime_error("pack");
                                   return t;
                                 },
                                 [&](const Tensor& t) {
                                   if (fails) throw std::runtime_error("unpack");
                                   return t;
                                 }};
    CHECK_THROWS_WITH_AS(exp(x), "pack", std::runtime_error);
    fails = false;
    y = exp(x).sum();
    CHECK(calls == 2);
  }
  fails = true;
  CHECK_THROWS_WITH_AS(y.backward(), "unpack", std::runtime_error);
  CHECK(is_grad_enabled());
  CHECK_FALSE(x.grad().defined());
  fails = false;
  y.backward();
  CHECK(values(x.grad())[0] == doctest::Approx(std::exp(1.0)));
}

TEST_CASE("what unpack returns must be like what was saved") {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  const auto with = [&](const Tensor& result) {
    const SavedTensorHooks guard{same, [=](const Tensor&) { return result; }};
    return (exp(x) * w).sum();
  };
  CHECK_THROWS_WITH_AS(
      with(ones({3}, {.dtype = DType::f64})).backward(),
      Contains("backward of mul: an unpack hook of SavedTensorHooks returned shape "
               "[3] for input 1, which had shape [2]"),
      ShapeError);
  CHECK_THROWS_WITH_AS(
      with(ones({2})).backward(),
      Contains("backward of mul: an unpack hook of SavedTensorHooks returned f32 for "
               "input 1, which was f64"),
      DTypeError);
  CHECK_THROWS_WITH_AS(with(Tensor()).backward(), Contains("an undefined tensor"), AutogradError);
}

TEST_CASE("another memory order of the same values makes no difference") {
  manual_seed(4);
  const Tensor x = randn({6, 4}).requires_grad_(), w = randn({5, 4}).requires_grad_();
  const auto gradients = [&] {
    x.set_grad({});
    w.set_grad({});
    linear(x, w, {}, Activation::relu).square().sum().backward();
    return std::pair(x.grad().to_vector<float>(), w.grad().to_vector<float>());
  };
  const auto expected = gradients();
  const SavedTensorHooks guard{
      same, [](const Tensor& t) { return t.dim() == 2 ? t.t().contiguous().t() : t; }};
  CHECK(gradients() == expected);
}

TEST_CASE(
    "a pack hook that writes to its tensor is an error; one that records goes through no hook") {
  const Tensor x = leaf({1, 2});
  {
    const SavedTensorHooks guard{[](Tensor t) { return t.mul_(2.0); }, same};
    CHECK_THROWS_WITH_AS(exp(x), Contains("exp: a pack hook of SavedTensorHooks changed output 0"),
                         AutogradError);
  }
  int calls = 0;
  const SavedTensorHooks guard{[&](const Tensor& t) {
                                 ++calls;
                                 EnableGradGuard on;
                                 return std::any((exp(x) * t).detach());
                               },
                               [](const std::any& t) { return std::any_cast<Tensor>(t); }};
  exp(x);
  CHECK(calls == 1);
}

TEST_CASE("nothing is packed where nothing is recorded") {
  const Tensor x = leaf({1, 2});
  int calls = 0;
  const SavedTensorHooks guard{[&](const Tensor& t) { return ++calls, t; }, same};
  exp(tensor(V{1}));
  const Tensor y = x * tensor(V{1, 2});
  CHECK(calls == 1);  // of mul, the other operand
  NoGradGuard off;
  exp(x);
  CHECK(calls == 1);
}

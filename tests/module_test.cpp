// Modules: names, ties, moving, cloning, the state dict, containers, a forgotten field, and errors
// with a path.
#include <doctest/doctest.h>

#include <thread>

#include <lockstep/nn/nn.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/pool.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/random.h>

#include "golden.h"
#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;

namespace {

std::vector<std::string> names(const NamedTensors& tensors) {
  std::vector<std::string> found;
  for (auto& [name, t] : tensors) found.push_back(name);
  return found;
}
using Names = std::vector<std::string>;

struct Net : nn::Module {
  nn::Conv2d conv1{1, 4, 3};
  nn::BatchNorm2d bn{4};
  nn::Linear fc1{36, 8}, fc2{8, 3, {.bias = false}};
  nn::Dropout drop{0.5};
  Tensor forward(Tensor x) {
    x = max_pool2d(relu(bn(conv1(x))), 2);
    return fc2(drop(relu(fc1(x.flatten(1)))));
  }
  LOCKSTEP_MODULE(Net, conv1, bn, fc1, fc2, drop)
};
static_assert(std::is_move_constructible_v<Net> && std::is_move_assignable_v<Net>);
static_assert(std::is_nothrow_move_constructible_v<Net>);  // vectors of modules may grow
static_assert(!std::is_copy_constructible_v<Net> && !std::is_copy_assignable_v<Net>);

/// Parts in every kind of field.
struct Deep : nn::Module {
  std::vector<nn::Linear> blocks;
  std::array<nn::Linear, 2> pair{nn::Linear{2, 2}, nn::Linear{2, 2}};
  std::unique_ptr<nn::Module> head = std::make_unique<nn::Linear>(2, 2);
  std::unique_ptr<nn::Module> none;
  std::optional<nn::Linear> maybe;
  std::optional<nn::Parameter> scale = nn::Parameter(ones({2}));
  nn::Parameter shift = zeros({2});
  nn::Buffer mask{ones({2}), false}, count = zeros({}, {.dtype = DType::i64});
  std::string label = "a label long enough to live on the heap";
  int depth = 3;
  Deep() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back(2, 2);
    blocks[1].weight = blocks[0].weight;  // tied
  }
  Tensor forward(Tensor x) {
    for (auto& block : blocks) x = block(x);
    for (auto& one : pair) x = one(x);
    return (*head)(x) * *scale + shift;
  }
  LOCKSTEP_MODULE(Deep, blocks, pair, head, none, maybe, scale, shift, mask, count, label, depth)
};

/// Not default-constructible, with a plain member that is not named.
struct Block : nn::Module {
  nn::Linear inner;
  bool residual;
  Block(int64_t width, bool residual) : inner(width, width), residual(residual) {}
  Tensor forward(Tensor x) { return residual ? x + inner(x) : inner(x); }
  LOCKSTEP_MODULE(Block, inner, residual)
};

struct Stack : nn::Module {
  nn::Sequential body{Block{2, true}, nn::ReLU{}, Block{2, false}};
  Deep deep;
  Tensor forward(Tensor x) { return deep(body(x)); }
  LOCKSTEP_MODULE(Stack, body, deep)
};

/// A module that extends another names that one's fields as well.
struct Taller : Block {
  nn::Linear extra{2, 2};
  Taller() : Block(2, false) {}
  Tensor forward(Tensor x) { return extra(Block::forward(x)); }
  LOCKSTEP_MODULE(Taller, inner, residual, extra)
};

/// A module that holds more of its own kind.
struct Tree : nn::Module {
  nn::Linear node{2, 2};
  std::vector<Tree> children;
  Tensor forward(Tensor x) {
    x = node(x);
    for (Tree& child : children) x = child(x);
    return x;
  }
  LOCKSTEP_MODULE(Tree, node, children)
};

// ---- modules with a fault ----

struct ForgetsLayer : nn::Module {
  nn::Linear a{2, 2}, b{2, 2};
  Tensor forward(Tensor x) { return b(a(x)); }
  LOCKSTEP_MODULE(ForgetsLayer, a)
};

struct ForgetsParameter : nn::Module {
  nn::Linear a{2, 2};
  nn::Parameter scale = ones({2});
  Tensor forward(Tensor x) { return a(x) * scale; }
  LOCKSTEP_MODULE(ForgetsParameter, a)
};

struct ForgetsModeOnly : nn::Module {  // no parameter is lost, but eval() would not reach it
  nn::Dropout drop;
  nn::Linear a{2, 2};
  Tensor forward(Tensor x) { return drop(a(x)); }
  LOCKSTEP_MODULE(ForgetsModeOnly, a)
};

struct HoldsForgetful : nn::Module {
  nn::Linear first{2, 2};
  std::vector<ForgetsLayer> rest;
  LOCKSTEP_MODULE(HoldsForgetful, first, rest)
  Tensor forward(Tensor x) { return x; }
};

struct Labelled : nn::Module {
  nn::Linear a{2, 2};
  std::string label = "x";
  nn::Linear b{2, 2};
  Tensor forward(Tensor x) { return b(a(x)); }
  LOCKSTEP_MODULE(Labelled, a, b)
};

// ---- modules that contain others, and odd signatures ----

struct Outer : nn::Module {
  Net net;
  std::vector<Block> blocks;
  Outer() { blocks.emplace_back(2, true); }
  Tensor forward(Tensor x) { return blocks[0](net(x)); }
  LOCKSTEP_MODULE(Outer, net, blocks)
};

struct Own : nn::Module {
  nn::Linear a{2, 2};
  Tensor forward(Tensor x) {
    CHECK_THROWS_AS(a(zeros({1, 3})), ShapeError);
    return x + zeros({7});
  }
  LOCKSTEP_MODULE(Own, a)
};

struct Two : nn::Module {
  Tensor forward(const Tensor& a, const Tensor& b) { return a + b; }
  LOCKSTEP_MODULE(Two)
};

}  // namespace

TEST_CASE("named_parameters: names and order are PyTorch's") {
  Net net;
  CHECK(names(net.named_parameters()) == Names{"conv1.weight", "conv1.bias", "bn.weight", "bn.bias",
                                               "fc1.weight", "fc1.bias", "fc2.weight"});
  CHECK(names(net.named_buffers()) ==
        Names{"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"});
  CHECK(names(net.state_dict()) ==
        Names{"conv1.weight", "conv1.bias", "bn.weight", "bn.bias", "bn.running_mean",
              "bn.running_var", "bn.num_batches_tracked", "fc1.weight", "fc1.bias", "fc2.weight"});
  CHECK(net.parameters().size() == 7);
  for (const Tensor& p : net.parameters()) CHECK(p.requires_grad());
  CHECK(net.named_modules().size() == 6);
  CHECK(net.named_modules()[0].first == "");
  CHECK(net.named_children()[3].first == "fc2");
}

TEST_CASE(
    "named_parameters: containers, optionals, owned bases; a module's own parameters come first") {
  Deep deep;
  CHECK(names(deep.named_parameters()) ==
        Names{"scale", "shift", "blocks.0.weight", "blocks.0.bias", "blocks.1.bias",
              "blocks.2.weight", "blocks.2.bias", "pair.0.weight", "pair.0.bias", "pair.1.weight",
              "pair.1.bias", "head.weight", "head.bias"});
  CHECK(names(deep.named_buffers()) == Names{"mask", "count"});
  const auto state = names(deep.state_dict());
  CHECK(std::count(state.begin(), state.end(), "blocks.1.weight") ==
        1);  // tied: once as parameter, saved twice
  CHECK(std::count(state.begin(), state.end(), "mask") == 0);
  CHECK(std::count(state.begin(), state.end(), "count") == 1);
  deep.maybe.emplace(2, 2);
  CHECK(deep.parameters().size() == 15);
  CHECK(deep(ones({1, 2})).shape() == Shape{1, 2});
}

TEST_CASE("LOCKSTEP_MODULE: modules that extend others, or hold their own kind") {
  Taller taller;
  CHECK(names(taller.named_parameters()) ==
        Names{"inner.weight", "inner.bias", "extra.weight", "extra.bias"});
  Taller copy = taller.clone();
  const Tensor x = randn({3, 2});
  CHECK(difference(copy(x), taller(x)) == 0);
  Tree tree;
  tree.children.resize(2);
  tree.children[1].children.resize(1);
  CHECK(names(tree.named_parameters()).back() == "children.1.children.0.node.bias");
  Tree other = tree.clone();
  CHECK(difference(other(x), tree(x)) == 0);
  CHECK(error_of([&] {
          tree.children[1].children[0](zeros({1, 3}));
        }).ends_with("in Tree.node (Linear 2->2)"));
  CHECK(error_of([&] { tree(zeros({1, 3})); }).ends_with("in Tree.node (Linear 2->2)"));
}

TEST_CASE("Module: constructed and destroyed on several threads at once") {
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) right += Stack().clone().parameters().size() == 17;
    });
  for (std::thread& t : threads) t.join();
  CHECK(right == 80);
}

TEST_CASE("clone: several threads may clone one module") {
  Stack stack;
  const size_t count = stack.parameters().size();
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) right += stack.clone().parameters().size() == count;
    });
  for (std::thread& t : threads) t.join();
  CHECK(right == 200);
}

TEST_CASE("Module: moving it keeps its tensors") {
  Net net;
  const auto before = net.parameters();
  Net moved = std::move(net);
  const auto after = moved.parameters();
  REQUIRE(after.size() == before.size());
  for (size_t i = 0; i < after.size(); ++i) CHECK(after[i].is_same(before[i]));
  CHECK(net.parameters().empty());  // NOLINT: a moved-from module is empty, not broken
  moved.eval();
  Net again;
  again = std::move(moved);
  CHECK(again.parameters()[0].is_same(before[0]));
  CHECK(!again.is_training());
}

TEST_CASE(
    "Module: one that was moved from is an error to call, save and clone, until it is whole") {
  const TemporaryFolder folder;
  const std::string file = folder / "net.safetensors";
  const Tensor x = ones({1, 2});
  nn::Sequential net{nn::Linear{2, 3}, nn::ReLU{}};
  const Tensor y = net(x);
  nn::Sequential owner = std::move(net);  // as a wrapper does that takes it
  const auto refuse = [&](auto f) {
    CHECK(contains(error_of(f), "Sequential: it was moved into another object and is empty"));
  };
  refuse([&] { net(x); });  // without layers it would return x
  refuse([&] { net.save(file); });
  refuse([&] { net.load_state_dict({}); });
  refuse([&] { net.clone(); });
  CHECK_FALSE(std::filesystem::exists(file));
  CHECK_NOTHROW(net.to_string());

  for (int i = 0; i < 2; ++i) {  // clone() moves its original there and back
    const nn::Sequential copy = owner.clone();
    CHECK(difference(owner(x), y) == 0);
  }
  std::swap(net, owner);
  CHECK(difference(net(x), y) == 0);
  refuse([&] { owner(x); });
  owner.push_back(nn::Linear{2, 5});
  CHECK(owner(x).shape() == Shape{1, 5});
  Outer outer;
  const Net part = std::move(outer.net);
  CHECK(contains(error_of([&] { outer.state_dict(); }), "Net: it was moved"));
  outer.net = Net();
  CHECK_NOTHROW(outer.state_dict());
}

TEST_CASE("LOCKSTEP_MODULE: a field that is left out is an error that names it") {
  CHECK(error_of([] { ForgetsLayer().parameters(); }) ==
        "ForgetsLayer: a member of type Linear (after a, at byte " +
            std::to_string(sizeof(nn::Module) + sizeof(nn::Linear)) +
            ") is not named in LOCKSTEP_MODULE(ForgetsLayer, ...), so it would not be trained, "
            "moved or saved; add it there");
  CHECK(error_of([] { ForgetsParameter().state_dict(); }).find("type Parameter (after a") !=
        std::string::npos);
  CHECK(error_of([] { ForgetsModeOnly().eval(); }).find("type Dropout (before all of them") !=
        std::string::npos);
  HoldsForgetful outer;
  CHECK_NOTHROW(outer.parameters());
  outer.rest.emplace_back();
  CHECK_THROWS_AS(outer.parameters(), Error);
}

TEST_CASE("clone: it is deep, keeps ties, plain values and modes, and leaves the original alone") {
  Stack stack;
  stack.deep.maybe.emplace(2, 2);
  stack.deep.eval();
  stack.deep.shift.requires_grad_(false);
  const auto before = stack.parameters();
  const Tensor x = randn({3, 2});
  const Tensor y = stack(x);
  Stack copy = stack.clone();

  const auto after = stack.parameters();
  REQUIRE(after.size() == before.size());
  for (size_t i = 0; i < after.size(); ++i) CHECK(after[i].is_same(before[i]));
  CHECK(stack.deep.label == "a label long enough to live on the heap");
  CHECK(difference(stack(x), y) == 0);

  CHECK(names(copy.named_parameters()) == names(stack.named_parameters()));
  const auto cloned = copy.parameters();
  for (size_t i = 0; i < cloned.size(); ++i) {
    CHECK(cloned[i].storage().data() != before[i].storage().data());
    CHECK(cloned[i].is_leaf());
    CHECK(cloned[i].requires_grad() == before[i].requires_grad());
    CHECK(difference(cloned[i], before[i]) == 0);
  }
  CHECK(copy.deep.blocks[1].weight.is_same(copy.deep.blocks[0].weight));
  CHECK(!copy.deep.mask.is_persistent());
  CHECK(copy.deep.mask.storage().data() != stack.deep.mask.storage().data());
  CHECK(copy.deep.label == stack.deep.label);
  CHECK(copy.deep.depth == 3);
  CHECK(copy.is_training());
  CHECK(!copy.deep.blocks[2].is_training());
  CHECK(copy.body.at<Block>(0).residual);
  CHECK(!copy.body.at<Block>(2).residual);
  CHECK(difference(copy(x), y) == 0);
  nn::init::zeros_(copy.deep.shift);
  nn::init::zeros_(copy.deep.blocks[0].weight);
  CHECK(difference(stack(x), y) == 0);
}

TEST_CASE("share: the same weights in another module") {
  Stack stack;
  Stack twin = stack.share();
  const auto a = stack.parameters(), b = twin.parameters();
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].is_same(b[i]));
  twin.eval();
  CHECK(stack.is_training());
}

TEST_CASE("clone: every member must be named") {
  Labelled m;
  const auto before = m.parameters();
  CHECK(error_of([&] { m.clone(); })
            .starts_with("clone: Labelled has " + std::to_string(sizeof(std::string)) +
                         " bytes after a that LOCKSTEP_MODULE does not name"));
  CHECK(m.parameters()[0].is_same(before[0]));
}

TEST_CASE("train, eval, requires_grad_ and zero_grad reach everything") {
  Stack stack;
  stack.eval();
  for (auto& [name, m] : stack.named_modules()) CHECK(!m->is_training());
  stack.train();
  for (auto& [name, m] : stack.named_modules()) CHECK(m->is_training());
  stack(ones({2, 2})).sum().backward();
  CHECK(stack.deep.shift.grad().defined());
  stack.zero_grad(false);
  CHECK(difference(stack.deep.shift.grad(), zeros({2})) == 0);
  stack.zero_grad();
  for (const Tensor& p : stack.parameters()) CHECK(!p.grad().defined());
  stack(ones({2, 2})).sum().backward();
  const Tensor shift = stack.deep.shift, kept = shift.grad().clone();
  stack.requires_grad_(false);
  for (const Tensor& p : stack.parameters()) CHECK(!p.requires_grad());
  CHECK(!stack(ones({2, 2})).requires_grad());
  CHECK(difference(shift.grad(), kept) == 0);
  CHECK(difference(kept, zeros({2})) > 0);
  const Stack copy = stack.clone();
  CHECK(!copy.deep.shift.requires_grad());
  CHECK(!copy.deep.shift.grad().defined());
  stack.zero_grad(false);
  CHECK(difference(shift.grad(), zeros({2})) == 0);
  stack.zero_grad();
  CHECK(!shift.grad().defined());
}

TEST_CASE("to(dtype) changes the storage inside the tensors, gradients too, and integers not") {
  Net net;
  net(randn({2, 1, 8, 8})).sum().backward();
  const auto before = net.parameters();
  const Tensor w = net.fc1.weight.detach().clone(), dw = net.fc1.weight.grad().clone();
  net.fc1.weight.requires_grad_(false);  // frozen or not
  Net& same = net.to(DType::f64);
  CHECK(&same == &net);
  for (const Tensor& p : before) {
    CHECK(p.dtype() == DType::f64);
    CHECK(p.grad().dtype() == DType::f64);
    CHECK(p.requires_grad() == !p.is_same(net.fc1.weight));
  }
  net.fc1.weight.requires_grad_();
  for (const Tensor& p : before) CHECK(p.leaf()->output().dtype == DType::f64);
  CHECK(net.bn.running_mean.dtype() == DType::f64);
  CHECK(net.bn.num_batches_tracked.dtype() == DType::i64);
  CHECK(difference(net.fc1.weight, w) == 0);
  CHECK(difference(net.fc1.weight.grad(), dw) == 0);
  net.zero_grad();
  net(randn({2, 1, 8, 8}, {.dtype = DType::f64})).sum().backward();
  CHECK(before[0].grad().dtype() == DType::f64);
  CHECK_THROWS_AS(net.to(DType::i64), DTypeError);
  static_assert(std::is_same_v<decltype(Net{}.to(Device{}, DType::f64)), Net>);
  CHECK(Net{}.to(Device{}, DType::f64).parameters()[0].dtype() == DType::f64);
  Deep deep;
  deep.to(DType::f64);
  CHECK(deep.blocks[1].weight.is_same(deep.blocks[0].weight));
}

TEST_CASE("load_state_dict: loads by name, and errors list everything that does not fit") {
  manual_seed(1);
  Net a;
  manual_seed(2);
  Net b;
  a(randn({4, 1, 8, 8}));  // moves the running statistics
  const Tensor w = b.conv1.weight;
  CHECK(difference(a.conv1.weight, w) > 0);
  CHECK(b.load_state_dict(a.state_dict()).missing.empty());
  CHECK(b.conv1.weight.is_same(w));
  for (size_t i = 0; i < a.state_dict().size(); ++i)
    CHECK(difference(a.state_dict()[i].second, b.state_dict()[i].second) == 0);
  CHECK(b.bn.num_batches_tracked.item<int64_t>() == 1);

  auto state = a.state_dict();
  state[0].first = "conv.weight";
  state[7].second = zeros({3, 3});
  const Tensor untouched = b.fc1.bias.detach().clone();
  state[8].second = ones({8});
  CHECK(error_of([&] { b.load_state_dict(state); }) ==
        "load_state_dict: the tensors given do not fit Net\n  missing: conv1.weight\n  unexpected: "
        "conv.weight\n  of "
        "another shape: fc1.weight (given [3, 3], here [8, 36])");
  CHECK_THROWS_AS(b.load_state_dict(state, {.strict = false}), ValueError);
  CHECK(difference(b.fc1.bias, untouched) == 0);
  state.erase(state.begin() + 7);
  const auto result = b.load_state_dict(state, {.strict = false});
  CHECK(result.missing == Names{"conv1.weight", "fc1.weight"});
  CHECK(result.unexpected == Names{"conv.weight"});
  CHECK(difference(b.fc1.bias, ones({8})) == 0);
}

TEST_CASE("save and load are safetensors, and convert to the module's dtype") {
  const TemporaryFolder folder;
  Stack a, b;
  a.save(folder / "net.safetensors");
  CHECK(load_safetensors(folder / "net.safetensors").at("deep.blocks.1.weight").shape() ==
        Shape{2, 2});
  b.to(DType::f64).load(folder / "net.safetensors");
  CHECK(b.deep.shift.dtype() == DType::f64);
  const auto x = a.state_dict(), y = b.state_dict();
  for (size_t i = 0; i < x.size(); ++i) CHECK(difference(x[i].second, y[i].second) == 0);
  CHECK_THROWS_AS(Net().load(folder / "net.safetensors"), ValueError);
}

TEST_CASE("load_state_dict: loading into a tensor that a pending backward needs is noticed") {
  nn::Linear a{2, 2};
  const Tensor y = a(randn({1, 2}, {.requires_grad = true})).sum();
  a.load_state_dict(a.state_dict());
  CHECK_THROWS_AS(y.backward(), AutogradError);
}

TEST_CASE("operator(): errors name the place in the model") {
  Net net;
  CHECK(error_of([&] { net(randn({2, 1, 9, 12})); }).ends_with("\n  in Net.fc1 (Linear 36->8)"));
  Outer outer;
  CHECK(error_of([&] {
          outer(randn({2, 1, 9, 12}));
        }).ends_with("\n  in Outer.net.fc1 (Linear 36->8)"));
  const std::string text = error_of([&] { outer(randn({2, 1, 8, 8})); });
  CHECK(text.ends_with("\n  in Outer.blocks.0.inner (Linear 2->2)"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
  nn::Linear alone{2, 3};
  CHECK(error_of([&] { alone(zeros({1, 5})); }).ends_with("\n  in Linear 2->3"));
  // An op of the module's own, and after an error that was caught inside.
  CHECK(error_of([] { Own()(zeros({2})); }).ends_with("\n  in Own"));
  nn::Sequential net2{nn::Linear{2, 4}, nn::ReLU{}, nn::Linear{3, 1}};
  CHECK(error_of([&] { net2(zeros({1, 2})); }).ends_with("\n  in Sequential.2 (Linear 3->1)"));
  nn::Sequential net3{nn::Linear{4, 4}, nn::ReLU{}};  // fused
  CHECK(error_of([&] { net3(zeros({1, 2})); }).ends_with("\n  in Sequential.0 (Linear 4->4)"));
}

TEST_CASE("operator(): a module of another signature says so when called through the base") {
  Two two;
  CHECK(two(ones({2}), ones({2})).sum().item<float>() == 4);
  nn::Module& base = two;
  CHECK(error_of([&] {
          base(ones({2}));
        }).starts_with("Two: its forward does not map one Tensor to one Tensor"));
}

TEST_CASE("to_string: as PyTorch prints") {
  CHECK(Net().to_string() ==
        "Net(\n"
        "  (conv1): Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1))\n"
        "  (bn): BatchNorm2d(4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)\n"
        "  (fc1): Linear(in_features=36, out_features=8, bias=True)\n"
        "  (fc2): Linear(in_features=8, out_features=3, bias=False)\n"
        "  (drop): Dropout(p=0.5)\n"
        ")");
  CHECK(nn::Sequential{nn::Sequential{nn::ReLU{}, nn::Flatten{}}, nn::LayerNorm{4}}.to_string() ==
        "Sequential(\n"
        "  (0): Sequential(\n"
        "    (0): ReLU()\n"
        "    (1): Flatten(start_dim=1, end_dim=-1)\n"
        "  )\n"
        "  (1): LayerNorm((4,), eps=1e-05, elementwise_affine=True)\n"
        ")");
  CHECK(nn::Conv2d(4, 6, {3, 2}, {.stride = {2, 1}, .padding = 1, .groups = 2, .bias = false})
            .to_string() ==
        "Conv2d(4, 6, kernel_size=(3, 2), stride=(2, 1), padding=(1, 1), groups=2, bias=False)");
}

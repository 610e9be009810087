// load_state_dict, to() and clone() where tensors are tied: by one tensor under several names, and
// by several parameters over one storage; and everything that loading refuses, which then changes
// nothing.
#include <doctest/doctest.h>

#include <cmath>

#include <lockstep/nn/nn.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>

#include "golden.h"
#include "temporary_folder.h"
#include "texts.h"

using namespace lockstep;

namespace {

/// a and b are tied as `Tie` says.
enum class Tie { tensor, storage };
struct Tied : nn::Module {
  nn::Parameter a = full({2, 2}, 1), b, own = full({3}, 7);
  nn::Buffer mask, steps = zeros({}, {.dtype = DType::i64});
  explicit Tied(Tie tie) {
    if (tie == Tie::tensor)
      b = a;
    else
      b = nn::Parameter(static_cast<const Tensor&>(a));
  }
  Tensor forward(const Tensor& x) { return x * a.sum() * b.sum(); }
  LOCKSTEP_MODULE(Tied, a, b, own, mask, steps)
};

struct Empty : nn::Module {
  nn::Parameter a = zeros({0, 3}), b = a, c = zeros({0, 3});
  Tensor forward(Tensor x) { return x; }
  LOCKSTEP_MODULE(Empty, a, b, c)
};

const Tensor kTwos = full({2, 2}, 2), kThrees = full({2, 2}, 3), kOwn = full({3}, 5),
             kSteps = full({}, 4, {.dtype = DType::i64});

double first(const Tensor& t) { return t.flatten()[0].item<double>(); }

/// Loading is refused with these parts in the text, strictly and not, and changes nothing.
template <class M>
void refuse(M& m, const NamedTensors& state, const std::vector<std::string>& parts,
            bool strict_alone = false) {
  std::vector<Tensor> before;
  for (auto& [name, t] : m.state_dict()) before.push_back(t.clone());
  for (const bool strict : {true, false}) {
    if (!strict && strict_alone) continue;
    const std::string text =
        error_of<ValueError>([&] { m.load_state_dict(state, {.strict = strict}); });
    for (const std::string& part : parts) CHECK_MESSAGE(contains(text, part), text);
    const NamedTensors now = m.state_dict();
    for (size_t i = 0; i < now.size(); ++i) CHECK(difference(now[i].second, before[i]) == 0);
  }
}

}  // namespace

TEST_CASE(
    "load_state_dict: a tied tensor is given under one name, or under all with equal values") {
  for (const Tie tie : {Tie::tensor, Tie::storage}) {
    CAPTURE(static_cast<int>(tie));
    for (const std::string name : {"a", "b"}) {
      Tied net(tie);
      const nn::LoadResult loaded =
          net.load_state_dict({{name, kTwos}, {"own", kOwn}, {"steps", kSteps}});
      CHECK(loaded.missing.empty());
      CHECK(first(net.a) == 2);
      CHECK(first(net.b) == 2);
      CHECK(first(net.own) == 5);
      CHECK(net.steps.item<int64_t>() == 4);
      CHECK(net.a.storage().data() == net.b.storage().data());
    }
    Tied net(tie);
    net.load_state_dict({{"a", kTwos}, {"b", kTwos.clone()}, {"own", kOwn}, {"steps", kSteps}});
    CHECK(first(net.b) == 2);
    const Tensor nan = full({2, 2}, NAN);
    net.load_state_dict({{"a", nan}, {"b", nan.clone()}, {"own", kOwn}, {"steps", kSteps}});
    CHECK(std::isnan(first(net.a)));
    net.load_state_dict({{"a", kTwos}}, {.strict = false});
    refuse(net, {{"a", kTwos}, {"b", kThrees}, {"own", kOwn}, {"steps", kSteps}},
           {"b (tied to a here, and given other values)"});
    refuse(net, {{"a", kTwos}, {"b", ones({4})}, {"own", kOwn}, {"steps", kSteps}},
           {"b (given [4], here [2, 2])"});
    refuse(net, {{"own", kOwn}, {"steps", kSteps}}, {"missing: a, b"}, true);
  }
}

TEST_CASE("load_state_dict: every misfit is listed, and nothing is changed") {
  Tied net(Tie::tensor);
  refuse(net,
         {{"a", ones({4})}, {"a", kTwos}, {"own", Tensor()}, {"steps", kSteps}, {"what", kOwn}},
         {"a (given twice)", "a (given [4], here [2, 2])", "own (given none, here [3])",
          "unexpected: what"});
  // An undefined buffer has no place for a value.
  refuse(net, {{"a", kTwos}, {"own", kOwn}, {"steps", kSteps}, {"mask", kOwn}},
         {"unexpected: mask"}, true);
  const nn::LoadResult result =
      net.load_state_dict({{"own", kOwn}, {"mask", kOwn}}, {.strict = false});
  CHECK(result.missing == std::vector<std::string>{"a", "b", "steps"});
  CHECK(result.unexpected == std::vector<std::string>{"mask"});
  CHECK(first(net.own) == 5);
  CHECK(!net.mask.defined());
}

TEST_CASE("load_state_dict: a prefix that all names have, or lack, is pointed out") {
  nn::Sequential net{nn::Linear{2, 3}, nn::Linear{3, 1}};
  NamedTensors wrapped, alien, part;
  for (const auto& [name, t] : net.state_dict()) {
    wrapped.emplace_back("module." + name, t);
    alien.emplace_back("layer." + name + "s", t);
    if (name.starts_with("1.")) part.emplace_back(name.substr(2), t);
  }
  const auto refuse = [&](const NamedTensors& state) {
    const std::string text = error_of<ValueError>([&] { net.load_state_dict(state); });
    return text.substr(text.rfind('\n') + 1);
  };
  CHECK(refuse(wrapped) ==
        "  the names given begin with 'module.', and those here do not: give them without it");
  wrapped.emplace_back("module.head.bias", ones({1}));  // and one that no name here corresponds to
  CHECK(refuse(wrapped) ==
        "  the names given begin with 'module.', and those here do not: give them without it");
  CHECK(refuse(part) == "  no name fits: they are of another model");  // 0 and 1 have these names
  CHECK(refuse(alien) == "  no name fits: they are of another model");
  alien.push_back(net.state_dict()[0]);
  CHECK(refuse(alien) == "  pass {.strict = false} to load those that fit");
  const NamedTensors bare = net.state_dict();
  nn::Sequential outer;
  outer.push_back(std::move(net));
  net = std::move(outer);
  CHECK(refuse(bare) ==
        "  the names here begin with '0.', and those given do not: give them with "
        "it, or load into that part");
}

TEST_CASE("load: an error of the state names the file") {
  const TemporaryFolder folder;
  nn::Linear{2, 3}.save(folder / "other.safetensors");
  nn::Linear net{3, 2};
  const std::string text = error_of<ValueError>([&] { net.load(folder / "other.safetensors"); });
  CHECK_MESSAGE(contains(text, "weight (given [3, 2], here [2, 3])"), text);
  CHECK_MESSAGE(text.ends_with("\n  in load of " + (folder / "other.safetensors")), text);
}

TEST_CASE("load_state_dict: converts dtypes, batch norm's counter too") {
  nn::BatchNorm1d norm{2};
  NamedTensors state = norm.state_dict();
  for (auto& [name, t] : state)
    t = name == "num_batches_tracked" ? full({}, 9, {.dtype = DType::f64})
                                      : full({2}, 0.5, {.dtype = DType::f64});
  norm.load_state_dict(state);
  CHECK(norm.num_batches_tracked.dtype() == DType::i64);
  CHECK(norm.num_batches_tracked.item<int64_t>() == 9);
  CHECK(norm.running_var.dtype() == DType::f32);
  CHECK(first(norm.running_var) == 0.5);
  nn::BatchNorm1d plain{2, {.affine = false, .track_running_stats = false}};
  CHECK(plain.state_dict().empty());
  CHECK(plain.load_state_dict({}).missing.empty());
}

TEST_CASE("load_state_dict: values that are the module's own, under other names, are exchanged") {
  nn::Sequential net{nn::Linear{2, 2}, nn::Linear{2, 2}};
  const Tensor w0 = net.at<nn::Linear>(0).weight.detach().clone(),
               w1 = net.at<nn::Linear>(1).weight.detach().clone();
  NamedTensors state = net.state_dict();  // shares the module's memory
  for (auto& [name, t] : state) name[0] = name[0] == '0' ? '1' : '0';
  net.load_state_dict(state);
  CHECK(difference(net.at<nn::Linear>(0).weight, w1) == 0);
  CHECK(difference(net.at<nn::Linear>(1).weight, w0) == 0);
  net.load_state_dict(net.state_dict());
  CHECK(difference(net.at<nn::Linear>(0).weight, w1) == 0);
}

TEST_CASE("load_state_dict: tensors without elements, tied ones too") {
  Empty net;
  CHECK(net.load_state_dict({{"b", ones({0, 3})}, {"c", ones({0, 3})}}).missing.empty());
  refuse(net, {{"b", ones({0, 3})}}, {"missing: c"}, true);
  refuse(net, {{"b", ones({0, 2})}, {"c", ones({0, 3})}}, {"b (given [0, 2], here [0, 3])"});
}

TEST_CASE("to and clone: tied tensors stay tied, and are the copy's own") {
  for (const Tie tie : {Tie::tensor, Tie::storage}) {
    CAPTURE(static_cast<int>(tie));
    Tied net(tie);
    net.b.requires_grad_(tie == Tie::tensor);
    Tied copy = net.clone();
    for (Tied* m : {&net, &copy})
      for (const DType dtype : {DType::f32, DType::f64, DType::f32}) {
        m->to(dtype);
        CHECK(m->b.dtype() == dtype);
        CHECK(m->a.is_same(m->b) == (tie == Tie::tensor));
        CHECK(m->a.requires_grad());
        CHECK(m->b.requires_grad() == (tie == Tie::tensor));
        nn::init::constant_(m->a, 3);
        CHECK(first(m->b) == 3);
        nn::init::constant_(m->b, 1);
        CHECK(first(m->a) == 1);
      }
    CHECK(net.a.storage().data() != copy.a.storage().data());
    nn::init::constant_(copy.a, 8);
    CHECK(first(net.a) == 1);
    CHECK(first(copy.own) == 7);
  }
}

TEST_CASE("clone: without the gradients and hooks of the original") {
  nn::Linear layer{2, 1};
  int calls = 0;
  const HookHandle hook =
      layer.weight.register_hook([&](const Tensor&) { return ++calls, Tensor(); });
  layer(ones({1, 2})).sum().backward();
  CHECK(calls == 1);
  nn::Linear copy = layer.clone();
  CHECK(!copy.weight.grad().defined());
  copy(ones({1, 2})).sum().backward();
  CHECK(calls == 1);
  CHECK(difference(copy.weight.grad(), ones({1, 2})) == 0);
  layer(ones({1, 2})).sum().backward();
  CHECK(calls == 2);
}

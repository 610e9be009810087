// What a module owns is named in LOCKSTEP_MODULE, or it is an error: at compile time for types that
// hide it, at the first visit where the module holds or points to it, at the first call where it is
// used. What belongs to somebody else, is passed in or made on the way is none.
#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <new>

#include <lockstep/distributed/data_parallel.h>
#include <lockstep/nn/nn.h>
#include <lockstep/optim/sgd.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/random.h>

#include "golden.h"
#include "texts.h"

using namespace lockstep;

// ---- at compile time ----

struct Incomplete;
struct OwnValue : std::vector<OwnValue> {};
using nn::detail::leads_to_part;
static_assert(leads_to_part<Tensor>() && leads_to_part<nn::Parameter*>());
static_assert(leads_to_part<nn::Linear* const>() && leads_to_part<nn::Linear[2]>());
static_assert(leads_to_part<std::vector<Tensor>>() && leads_to_part<std::deque<nn::Linear>>());
static_assert(leads_to_part<std::list<nn::Parameter>>());
static_assert(leads_to_part<std::map<std::string, std::unique_ptr<nn::Module>>>());
static_assert(leads_to_part<std::vector<std::pair<std::string, nn::Linear*>>>());
static_assert(leads_to_part<std::tuple<int, std::optional<Tensor>>>());
static_assert(leads_to_part<std::weak_ptr<nn::Linear>>());
static_assert(leads_to_part<std::pair<int, nn::Linear>>() &&
              leads_to_part<std::array<Tensor, 2>>());
static_assert(leads_to_part<std::variant<std::monostate, nn::Linear>>());
static_assert(leads_to_part<std::unique_ptr<std::vector<std::optional<nn::Parameter>>>>());
static_assert(!leads_to_part<std::variant<int, std::string>>() &&
              !leads_to_part<std::pair<int, int>>());
static_assert(!leads_to_part<std::string>() && !leads_to_part<std::vector<int>>());
static_assert(!leads_to_part<Incomplete*>() && !leads_to_part<void*>() &&
              !leads_to_part<OwnValue>());
static_assert(!leads_to_part<void (*)(Tensor)>() &&
              !leads_to_part<std::function<Tensor(Tensor)>>());

namespace {

struct Pairwise : nn::Module {
  Tensor forward(const Tensor& a, const Tensor& b) { return a + b; }
  LOCKSTEP_MODULE(Pairwise)
};
static_assert(nn::UnaryModule<nn::Linear> && nn::UnaryModule<nn::Module>);
static_assert(!nn::UnaryModule<Pairwise> && !nn::UnaryModule<nn::CrossEntropyLoss>);

// ---- forgotten: each holds a layer, named nowhere, beside one that is named ----

template <class Held, class Get>
struct Forgets : nn::Module {
  nn::Linear named{2, 2};
  Held held;
  explicit Forgets(Held held) : held(std::move(held)) {}
  Tensor forward(Tensor x) { return Get()(held, named(x)); }
  LOCKSTEP_MODULE(Forgets, named)
};
auto first = [](auto& held, const Tensor& x) { return held[0](x); };
auto pointed = [](auto& held, const Tensor& x) { return (*held)(x); };
auto direct = [](auto& held, const Tensor& x) { return held->forward(x); };
auto mapped = [](auto& held, const Tensor& x) { return held.begin()->second(x); };
auto mapped_direct = [](auto& held, const Tensor& x) { return held.begin()->second.forward(x); };
auto scaled = [](auto& held, const Tensor& x) { return x * held; };
auto scaled_first = [](auto& held, const Tensor& x) { return x * held[0]; };
auto scaled_pointed = [](auto& held, const Tensor& x) { return x * *held; };

/// A module that makes what it holds itself, as most do.
struct ForgetsVector : nn::Module {
  nn::Linear named{2, 2};
  std::vector<nn::Linear> blocks;
  ForgetsVector() {
    blocks.reserve(2);
    for (int i = 0; i < 2; ++i) blocks.emplace_back(2, 2);
    for (nn::Linear& b : blocks)
      for (const Tensor& p : b.parameters()) nn::init::zeros_(p);
    blocks[0](zeros({1, 2}));  // a look at the shape that comes out
  }
  Tensor forward(Tensor x) { return blocks[1](blocks[0](named(x))); }
  LOCKSTEP_MODULE(ForgetsVector, named)
};
struct ForgetsUnique : nn::Module {
  nn::Linear named{2, 2};
  std::unique_ptr<nn::Linear> head = std::make_unique<nn::Linear>(2, 2);
  Tensor forward(Tensor x) { return head->forward(named(x)); }
  LOCKSTEP_MODULE(ForgetsUnique, named)
};
struct ForgetsShared : nn::Module {
  std::shared_ptr<nn::Module> head = std::make_shared<nn::Dropout>();  // eval() would not reach it
  Tensor forward(Tensor x) { return (*head)(x); }
  LOCKSTEP_MODULE(ForgetsShared)
};
struct ForgetsArray : nn::Module {
  std::array<nn::Linear, 2> pair{nn::Linear{2, 2}, nn::Linear{2, 2}};
  Tensor forward(Tensor x) { return pair[0](x); }
  LOCKSTEP_MODULE(ForgetsArray)
};
struct ForgetsOptional : nn::Module {
  std::optional<nn::Parameter> gain = nn::Parameter(ones({2}));
  Tensor forward(Tensor x) { return x * *gain; }
  LOCKSTEP_MODULE(ForgetsOptional)
};
struct ForgetsParameters : nn::Module {
  nn::Linear named{2, 2};
  std::vector<nn::Parameter> gains;
  ForgetsParameters() { gains.emplace_back(ones({2})); }
  Tensor forward(Tensor x) { return named(x) * gains[0]; }
  LOCKSTEP_MODULE(ForgetsParameters, named)
};
struct Affine {  // no module
  int64_t size = 2;
  nn::Parameter gain = ones({2}), shift = zeros({2});
};
struct ForgetsStruct : nn::Module {
  nn::Linear named{2, 2};
  Affine affine;
  Tensor forward(Tensor x) { return named(x) * affine.gain; }
  LOCKSTEP_MODULE(ForgetsStruct, named)
};
struct NamesStruct : nn::Module {  // which says nothing of what is in it
  nn::Linear named{2, 2};
  Affine affine;
  Tensor forward(Tensor x) { return named(x) * affine.gain; }
  LOCKSTEP_MODULE(NamesStruct, named, affine)
};
struct ForgetsPair : nn::Module {
  std::pair<int, nn::Linear> pair{1, nn::Linear{2, 2}};
  Tensor forward(Tensor x) { return pair.second(x); }
  LOCKSTEP_MODULE(ForgetsPair)
};
struct ForgetsTuple : nn::Module {
  nn::Linear named{2, 2};
  std::tuple<nn::BatchNorm1d> rest{nn::BatchNorm1d{2}};
  Tensor forward(Tensor x) { return std::get<0>(rest)(named(x)); }
  LOCKSTEP_MODULE(ForgetsTuple, named)
};
struct HoldsForgetful : nn::Module {
  nn::Linear a{2, 2};
  ForgetsVector inner;
  Tensor forward(Tensor x) { return inner(a(x)); }
  LOCKSTEP_MODULE(HoldsForgetful, a, inner)
};

const Tensor& input() {
  static const Tensor x = ones({3, 2});
  return x;
}

/// The error of the first call under the outermost module, with and without a graph.
template <class Held, class Get>
std::string error_of_call(Held held, Get, bool graph = true) {
  return error_of([&] {
    const AutoGradMode mode(graph);
    Forgets<Held, Get> net(std::move(held));
    nn::Sequential outer{std::move(net)};
    outer(input());
  });
}

template <class List = std::vector<nn::Linear>>
List layers() {
  List all;
  all.emplace_back(2, 2);
  return all;
}
struct Pack {
  int64_t number = 1;
  nn::Linear layer{2, 2};
};
auto packed = [](auto& held, const Tensor& x) { return held->layer(x); };
std::map<std::string, nn::Linear> layer_map() {
  std::map<std::string, nn::Linear> all;
  all.emplace("a", nn::Linear{2, 2});
  return all;
}

// ---- legitimate ----

struct Critic : nn::Module {
  nn::Linear fc{2, 1};
  Tensor forward(Tensor x) { return fc(x); }
  LOCKSTEP_MODULE(Critic, fc)
};
struct Penalty : nn::Module {  // is given the module that it calls
  nn::Buffer scale = full({}, 0.5);
  template <class M>
  Tensor forward(M& critic, const Tensor& x) {
    return critic(x).square().mean() * scale;
  }
  Tensor forward(std::unique_ptr<Critic>& critic, const Tensor& x) { return forward(*critic, x); }
  LOCKSTEP_MODULE(Penalty, scale)
};
struct Student : nn::Module {
  nn::Linear own{2, 1};
  std::reference_wrapper<Critic> teacher;
  explicit Student(Critic& teacher) : teacher(teacher) {}
  Tensor forward(const Tensor& x) { return own(x) - teacher(x); }
  LOCKSTEP_MODULE(Student, own, teacher)
};
struct ByPointer : nn::Module {
  nn::Linear own{2, 1};
  Critic* teacher;
  explicit ByPointer(Critic* teacher) : teacher(teacher) {}
  Tensor forward(const Tensor& x) { return own(x) - teacher->fc(x); }
  LOCKSTEP_MODULE(ByPointer, own)
};
struct SharedParts : nn::Module {
  std::shared_ptr<nn::Linear> a = std::make_shared<nn::Linear>(2, 2), b = a;
  std::unique_ptr<nn::Parameter> gain = std::make_unique<nn::Parameter>(ones({2}));
  Tensor forward(const Tensor& x) { return (*b)((*a)(x)) * *gain; }
  LOCKSTEP_MODULE(SharedParts, a, b, gain)
};
struct Pointers : nn::Module {  // to parts of its own
  std::shared_ptr<nn::Linear> a = std::make_shared<nn::Linear>(2, 2), b = a;
  nn::Linear* last = nullptr;
  nn::Parameter* tied = nullptr;
  std::vector<nn::Linear> list;
  Pointers() {
    list.emplace_back(2, 2);
    last = &list.back();
    tied = &last->weight;
  }
  Tensor forward(const Tensor& x) { return matmul((*last)((*b)((*a)(x))), tied->t()); }
  LOCKSTEP_MODULE(Pointers, a, b, list)
};
struct WithParent : nn::Module {
  struct Child : nn::Module {
    WithParent* parent;
    nn::Linear fc{2, 2};
    explicit Child(WithParent* parent) : parent(parent) { eval(); }
    Tensor forward(const Tensor& x) { return fc(x) * parent->gain; }
    LOCKSTEP_MODULE(Child, fc)
  };
  nn::Parameter gain = ones({2});
  std::vector<std::unique_ptr<Child>> children;
  WithParent() { children.push_back(std::make_unique<Child>(this)); }
  Tensor forward(const Tensor& x) { return (*children[0])(x); }
  LOCKSTEP_MODULE(WithParent, gain, children)
};
/// Leaves that are made in forward, and the gradient by them.
struct Energy : nn::Module {
  nn::Linear fc{2, 1};
  Tensor forward(const Tensor& x) {
    const Tensor leaf = x.detach().clone().requires_grad_();
    return fc(leaf) + leaf.sum({1}, true) + nn::Dropout{0.5}(x).sum({1}, true);
  }
  LOCKSTEP_MODULE(Energy, fc)
};
struct Batch {
  Tensor x;
};
struct TakesStruct : nn::Module {
  nn::Linear fc{2, 1};
  Tensor forward(const Batch& batch) { return fc(batch.x); }
  LOCKSTEP_MODULE(TakesStruct, fc)
};
struct ByReference : nn::Module {
  nn::Linear own{2, 1};
  Critic& teacher;
  explicit ByReference(Critic& teacher) : teacher(teacher) {}
  Tensor forward(const Tensor& x) { return own(x) - teacher(x); }
  LOCKSTEP_MODULE(ByReference, own, teacher)
};
/// Handles to tensors of other modules: a regularizer.
struct Decay : nn::Module {
  std::vector<Tensor> weights;
  explicit Decay(std::vector<Tensor> weights) : weights(std::move(weights)) {}
  Tensor forward(const Tensor& loss) {
    Tensor sum = loss;
    for (const Tensor& w : weights) sum = sum + w.square().sum();
    return sum;
  }
  LOCKSTEP_MODULE(Decay)
};

}  // namespace

TEST_CASE(
    "LOCKSTEP_MODULE: what the class holds and does not name is an error at the first visit") {
  const std::string rest = " is not named in LOCKSTEP_MODULE(";
  const auto check = [&](auto net, const std::string& what) {
    CAPTURE(what);
    const std::string text = error_of([&] { net.parameters(); });
    CHECK_MESSAGE(contains(text, what), text);
    CHECK(contains(text, rest));
    CHECK_THROWS_AS(net(input()), Error);
    CHECK_THROWS_AS(net.state_dict(), Error);
    CHECK_THROWS_AS(net.eval(), Error);
    CHECK_THROWS_AS(nn::summary(net, input()), Error);
    CHECK_THROWS_AS(optim::SGD(net.parameters(), {}), Error);
    CHECK_THROWS_AS(dist::DistributedDataParallel(net, dist::Group()).parameters(), Error);
    auto moved = std::move(net);
    CHECK_THROWS_AS(moved.parameters(), Error);
  };
  check(ForgetsVector(), "ForgetsVector: a member that holds or points to a Linear (after named");
  check(ForgetsUnique(), "a member that holds or points to a Linear (after named");
  check(ForgetsShared(), "a member that holds or points to a Dropout (before all of them");
  check(ForgetsArray(), "ForgetsArray: a member of type Linear");
  check(ForgetsOptional(), "ForgetsOptional: a member of type Parameter");
  check(ForgetsParameters(), "a member that holds or points to a Parameter (after named");
  check(ForgetsStruct(), "ForgetsStruct: a member of type Parameter (after named");
  check(NamesStruct(),
        "NamesStruct: a member of type Parameter (inside affine, whose type should be");
  check(ForgetsPair(), "ForgetsPair: a member of type Linear (before all of them");
  check(ForgetsTuple(), "ForgetsTuple: a member of type BatchNorm1d (after named");
  check(HoldsForgetful(), "ForgetsVector: a member that holds or points to a Linear");
}

TEST_CASE("LOCKSTEP_MODULE: what forward uses and nobody names is an error at the first call") {
  const std::string call = ": its forward calls a Linear that has parameters and is in no field",
                    use = ": its forward uses a Parameter of shape [2, 2] that requires grad";
  for (const bool graph : {true, false}) {
    CAPTURE(graph);
    CHECK(contains(error_of_call(layers(), first, graph), call));
    CHECK(contains(error_of_call(std::make_unique<nn::Linear>(2, 2), pointed, graph), call));
    CHECK(contains(error_of_call(std::make_shared<nn::Linear>(2, 2), pointed, graph), call));
    CHECK(contains(error_of_call(layer_map(), mapped, graph), call));
    CHECK(contains(error_of_call(layers<std::deque<nn::Linear>>(), first, graph), call));
    CHECK(contains(error_of_call(std::make_unique<Pack>(), packed, graph), call));
    nn::Linear outside{2, 2};
    CHECK(contains(error_of_call(&outside, pointed, graph), call));
    CHECK(contains(error_of_call([&](const Tensor& x) { return outside(x); },
                                 [](auto& f, const Tensor& x) { return f(x); }, graph),
                   call));
  }
  // Without a call of its own, a parameter is seen in the graph.
  CHECK(contains(error_of_call(std::make_unique<nn::Linear>(2, 2), direct), use));
  CHECK(contains(error_of_call(layer_map(), mapped_direct), use));
  CHECK(contains(error_of_call(std::map<int, nn::Parameter>{{1, nn::Parameter(ones({2, 2}))}},
                               [](auto& held, const Tensor& x) { return matmul(x, held.at(1)); }),
                 use));
  CHECK(contains(error_of_call(std::make_shared<nn::Parameter>(ones({2})), scaled_pointed),
                 "uses a Parameter of shape [2] that requires grad"));
  const std::string plain = "uses a Tensor of shape [2] that requires grad and is neither";
  CHECK(contains(error_of_call(ones({2}).requires_grad_(), scaled), plain));
  CHECK(contains(error_of_call(std::vector<Tensor>{ones({2}).requires_grad_()}, scaled_first),
                 plain));
  // No error: a constant.
  CHECK(error_of_call(ones({2}), scaled) == "no error of this kind");
}

TEST_CASE("LOCKSTEP_MODULE: the error names the place in the model") {
  nn::Sequential net{nn::ReLU{},
                     Forgets<std::map<std::string, nn::Linear>, decltype(mapped)>(layer_map())};
  CHECK(contains(error_of([&] { net(input()); }), "Sequential.1"));
}

TEST_CASE("operator(): modules that are arguments may be called") {
  Penalty penalty;
  Critic critic, wrapped;
  auto owned = std::make_unique<Critic>();
  dist::DistributedDataParallel ddp{wrapped, dist::Group()};
  CHECK_NOTHROW(penalty(critic, input()).backward());
  CHECK_NOTHROW(penalty(owned, input()).backward());
  CHECK_NOTHROW(penalty(ddp, input()).backward());
  CHECK(critic.fc.weight.grad().defined());
}

TEST_CASE(
    "operator(): modules that belong to others are called by reference_wrapper or external()") {
  Critic teacher;
  Student student(teacher);
  student(input()).sum().backward();
  CHECK(teacher.fc.weight.grad().defined());
  CHECK(student.parameters().size() == 2);  // the teacher's are not its own
  student.eval();
  CHECK(teacher.is_training());
  Student twin = student.clone();
  CHECK(&twin.teacher.get() == &teacher);

  Critic other;
  ByPointer by_pointer(&other);
  CHECK_NOTHROW(by_pointer.parameters());  // older than the module: not its own
  CHECK_THROWS_AS(by_pointer(input()), Error);
  nn::external(other.fc);
  CHECK_NOTHROW(by_pointer(input()));
  Critic moved = std::move(other);  // which stays external
  ByPointer again(&moved);
  CHECK_NOTHROW(again(input()));
}

TEST_CASE("clone: a field that is a reference is an error, and what it refers to stays as it is") {
  Critic teacher;
  const Tensor weight = teacher.fc.weight;
  ByReference student(teacher);
  CHECK_NOTHROW(student(input()).sum().backward());
  CHECK(contains(error_of([&] { student.clone(); }),
                 "clone: ByReference names teacher, which is a reference"));
  CHECK(teacher.fc.weight.is_same(weight));
}

TEST_CASE("operator(): legitimate modules pass") {
  Critic real, fake;  // a GAN's two, and a loss with a buffer
  (real(fake.fc(input()).expand({3, 2})) + fake(input())).sum().backward();
  Pointers pointers;
  pointers(input()).sum().backward();
  CHECK(pointers.parameters().size() == 4);
  WithParent parent;
  CHECK_NOTHROW(parent(input()).sum().backward());
  CHECK_NOTHROW(Energy()(input()).sum().backward());
  const Tensor x = ones({3, 2}).requires_grad_();
  CHECK_NOTHROW(TakesStruct()(Batch{x}).sum().backward());
  CHECK_NOTHROW(Critic()(x).sum().backward());
  CHECK_NOTHROW(Decay(real.parameters())(real(input()).sum()).backward());
}

TEST_CASE("LOCKSTEP_MODULE: a shared_ptr in two places is one set of parameters") {
  SharedParts net;
  net(input()).sum().backward();
  CHECK(net.parameters().size() == 3);
  SharedParts copy = net.clone();
  CHECK(copy.a->weight.is_same(copy.b->weight));
  CHECK(!copy.a->weight.is_same(net.a->weight));
  CHECK(!copy.gain->is_same(*net.gain));
  CHECK(difference(copy(input()), net(input())) == 0);
}

TEST_CASE("LOCKSTEP_MODULE: stale bytes in a named field, as an empty option's, are no pointer") {
  alignas(nn::Parameter) unsigned char room[sizeof(nn::Parameter)];
  alignas(nn::MaxPool2d) unsigned char memory[sizeof(nn::MaxPool2d)];
  const void* part = room;
  for (size_t at = 0; at + sizeof part <= sizeof memory; at += sizeof part)
    std::memcpy(memory + at, &part, sizeof part);
  asm volatile("" : : "r"(memory) : "memory");  // the bytes are there when the module is made
  auto* pool = new (memory) nn::MaxPool2d{2};
  auto* elsewhere = new (room) nn::Parameter(ones({2}));
  CHECK_NOTHROW((*pool)(ones({1, 1, 2, 2})));
  elsewhere->~Parameter();
  pool->~MaxPool2d();
}

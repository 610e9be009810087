// What a call runs: the object's own forward, through whatever reference, container or wrapper it
// is called; the same numbers whether Sequential fuses its layers or an observer keeps it from
// that; and what is left after recursion, exceptions, observers that come and go, and calls on
// several threads.
#include <doctest/doctest.h>

#include <cstring>
#include <stdexcept>
#include <thread>

#include <lockstep/distributed/data_parallel.h>
#include <lockstep/nn/nn.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/random.h>

#include "golden.h"
#include "texts.h"

using namespace lockstep;

namespace {

struct Scaled : nn::Linear {
  double s = 10;
  using nn::Linear::Linear;
  Tensor forward(const Tensor& x) { return nn::Linear::forward(x) * s; }
  LOCKSTEP_MODULE(Scaled, weight, bias, s)
};
struct Leaky : nn::ReLU {
  Tensor forward(Tensor x) { return leaky_relu(x, 0.5); }
  LOCKSTEP_MODULE(Leaky)
};
/// Gets at its base's forward by the call operator.
struct CallsBase : nn::Linear {
  using nn::Linear::Linear;
  Tensor forward(const Tensor& x) { return nn::Linear::operator()(x) + 1.0; }
  LOCKSTEP_MODULE(CallsBase, weight, bias)
};
struct TwoInputs : nn::Linear {
  using nn::Linear::Linear;
  Tensor forward(const Tensor& x, const Tensor& y) { return nn::Linear::forward(x) + y; }
  LOCKSTEP_MODULE(TwoInputs, weight, bias)
};
struct Inherits : Scaled {  // forward and fields as they are
  using Scaled::Scaled;
  LOCKSTEP_MODULE(Inherits, weight, bias, s)
};
struct NoMacro : nn::Linear {
  using nn::Linear::Linear;
  Tensor forward(const Tensor& x) { return nn::Linear::forward(x) * 10.0; }
};
struct NoMacroNorm : nn::BatchNorm1d {
  using nn::BatchNorm1d::BatchNorm1d;
};
struct NoMacroChain : nn::Sequential {
  NoMacroChain() : Sequential(nn::ReLU{}) {}
};

struct Block : nn::Sequential {
  nn::Parameter gain = full({3}, 2);
  Block() : Sequential(nn::Linear{2, 3}, nn::ReLU{}) {}
  Tensor forward(Tensor x) { return Sequential::forward(std::move(x)) * gain; }
  LOCKSTEP_MODULE(Block, modules, gain)
};
struct ForgetfulBlock : nn::Sequential {
  nn::Parameter gain = ones({3});
  ForgetfulBlock() : Sequential(nn::Linear{2, 3}) {}
  LOCKSTEP_MODULE(ForgetfulBlock, gain)
};

template <class M>
M with_ones(M linear) {
  nn::init::ones_(linear.weight);
  nn::init::zeros_(linear.bias);
  return linear;
}
double at(nn::Module& m, double x) { return m(full({1, 1}, x)).item<double>(); }

struct Watch : nn::CallObserver {
  std::vector<std::string> left;
  void enter(nn::Module&) override {}
  void leave(nn::Module& m, const Tensor*) override { left.push_back(m.module_type().name); }
};

/// Calls itself.
struct Recursive : nn::Module {
  nn::Linear fc{2, 2};
  Tensor forward(const Tensor& x, int depth) { return depth ? (*this)(fc(x), depth - 1) : x; }
  LOCKSTEP_MODULE(Recursive, fc)
};
/// Throws what is no Error.
struct Throws : nn::Module {
  nn::Linear fc{2, 2};
  int how = 0;
  Tensor forward(const Tensor& x) {
    const Tensor y = fc(x);
    if (how == 1) throw 1;
    if (how == 2) throw std::bad_alloc();
    if (how == 3) throw std::out_of_range("what");
    return y;
  }
  LOCKSTEP_MODULE(Throws, fc, how)
};
struct BadBrief : nn::Linear {
  using nn::Linear::Linear;
  Tensor forward(const Tensor& x) { return nn::Linear::forward(x); }
  std::string brief() const override { throw 1; }
  LOCKSTEP_MODULE(BadBrief, weight, bias)
};
struct Calls : nn::Module {
  std::function<void()> f;
  explicit Calls(std::function<void()> f) : f(std::move(f)) {}
  Tensor forward(const Tensor& x) {
    f();
    return x;
  }
  LOCKSTEP_MODULE(Calls, f)
};

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(),
                     static_cast<size_t>(a.numel()) * size_of(a.dtype())) == 0;
}

}  // namespace

TEST_CASE("Sequential runs the forward of subclasses of what it fuses") {
  nn::Sequential a{with_ones(Scaled{1, 1})}, b{with_ones(Scaled{1, 1}), nn::ReLU{}},
      c{with_ones(nn::Linear{1, 1}), Leaky{}}, d{with_ones(Inherits{1, 1}), nn::ReLU{}};
  CHECK(at(a, 2) == 20);
  CHECK(at(b, 2) == 20);
  CHECK(at(c, -2) == -1);
  CHECK(at(d, 2) == 20);
  const Watch watch;
  CHECK(at(b, 2) == 20);
  CHECK(at(c, -2) == -1);
}

TEST_CASE("operator() through a base class runs the object's own forward") {
  Scaled scaled = with_ones(Scaled{1, 1});
  nn::Linear& linear = scaled;
  const Tensor x = full({1, 1}, 2);
  CHECK(linear(x).item<double>() == 20);
  std::vector<std::unique_ptr<nn::Linear>> list;
  list.push_back(std::make_unique<Scaled>(with_ones(Scaled{1, 1})));
  CHECK((*list[0])(x).item<double>() == 20);
  nn::Sequential net{with_ones(Scaled{1, 1})};
  CHECK(net.at<nn::Linear>(0)(x).item<double>() == 20);
  dist::DistributedDataParallel<nn::Linear> wrapped{linear, dist::Group()};
  CHECK(wrapped(x).item<double>() == 20);
  Leaky leaky;
  nn::ReLU& relu = leaky;
  CHECK(relu(full({1}, -2)).item<double>() == -1);
  // Another signature than the base's cannot be guessed.
  CHECK(
      contains(error_of([&] { linear(x, Activation::relu); }),
               "call: the object is a Scaled referred to as its base class lockstep::nn::Linear"));
  TwoInputs two{1, 1};
  nn::Linear& base = two;
  CHECK_THROWS_AS(base(x), Error);
  CHECK(two(x, x).shape() == Shape{1, 1});
}

TEST_CASE("operator() of the base, called by a subclass's forward, is the base's forward") {
  CallsBase m = with_ones(CallsBase{1, 1});
  CHECK(at(m, 2) == 3);
  nn::Linear& base = m;
  CHECK(base(full({1, 1}, 2)).item<double>() == 3);
}

TEST_CASE("clone, share and to of a subclass through its base never slice it") {
  Scaled scaled = with_ones(Scaled{1, 1});
  nn::Linear& base = scaled;
  CHECK_THROWS_AS(base.clone(), Error);
  CHECK_THROWS_AS(base.share(), Error);
  CHECK_THROWS_AS(std::move(base).to(DType::f64), Error);
  CHECK(scaled.weight.dtype() == DType::f32);
  nn::Sequential net{std::move(scaled)};
  nn::Sequential copy = net.clone(), shared = net.share();
  CHECK(at(copy, 2) == 20);
  CHECK(at(shared, 2) == 20);
  CHECK(nn::summary(net, zeros({1, 1})).rows[1].type == "Scaled 1->1");
}

TEST_CASE("a subclass without its own LOCKSTEP_MODULE is an error that names it") {
  const Tensor x = zeros({2, 1});
  NoMacro m{1, 1};
  const std::string want = "NoMacro: it extends Linear and has no LOCKSTEP_MODULE of its own";
  CHECK(contains(error_of([&] { m(x); }), want));
  CHECK(contains(error_of([&] { static_cast<nn::Module&>(m)(x); }), want));
  CHECK(contains(error_of([&] { m.parameters(); }), want));
  CHECK(contains(error_of([&] { m.eval(); }), want));
  CHECK(contains(error_of([&] { m.clone(); }), want));
  CHECK(contains(error_of([&] { m.to_string(); }), want));
  CHECK(contains(error_of([&] { nn::summary(m, x); }), want));
  CHECK(contains(error_of([&] { dist::DistributedDataParallel(m, dist::Group()).parameters(); }),
                 want));
  nn::Sequential net{NoMacro{1, 1}, nn::ReLU{}};
  CHECK(contains(error_of([&] { net(x); }), want));
  CHECK(contains(error_of([&] { net.parameters(); }), want));
  CHECK_THROWS_AS(NoMacroNorm{1}(x), Error);
  CHECK_THROWS_AS(NoMacroChain()(x), Error);
}

TEST_CASE("Sequential can be extended: a subclass names `modules`, and may not forget it") {
  Block block;
  std::vector<std::string> names;
  for (auto& [name, p] : block.named_parameters()) names.push_back(name);
  CHECK(names == std::vector<std::string>{"gain", "0.weight", "0.bias"});
  const Tensor x = randn({4, 2});
  CHECK(difference(block(x), relu(block.at<nn::Linear>(0)(x)) * 2.0) < 1e-6);
  Block copy = block.clone();
  CHECK(difference(copy(x), block(x)) == 0);
  CHECK(!copy.at<nn::Linear>(0).weight.is_same(block.at<nn::Linear>(0).weight));
  block.eval();
  CHECK(!block[0].is_training());
  CHECK(contains(error_of([&] { ForgetfulBlock().parameters(); }),
                 "ForgetfulBlock: a member of type PositionalModules"));
}

TEST_CASE("Sequential: fused and observed runs agree bit for bit, forward and backward") {
  for (const DType dtype : {DType::f32, DType::f64})
    for (const Shape& rows : {Shape{1}, Shape{7}, Shape{130}, Shape{3, 5}, Shape{0}}) {
      CAPTURE(rows.dims());
      manual_seed(3);
      nn::Sequential net{nn::Linear{20, 33}, nn::ReLU{}, nn::Linear{33, 9, {.bias = false}},
                         nn::ReLU{}};
      net.to(dtype);
      Shape shape = rows;
      shape.push_back(20);
      const Tensor x = randn(shape, {.dtype = dtype}).requires_grad_();
      const auto run = [&] {
        net.zero_grad();
        x.set_grad({});
        const Tensor y = net(x);
        (y * y).sum().backward();
        std::vector<Tensor> all{y.detach(), x.grad()};
        for (const Tensor& p : net.parameters()) all.push_back(p.grad());
        return all;
      };
      const std::vector<Tensor> fused = run();
      Watch watch;
      const std::vector<Tensor> observed = run();
      CHECK(watch.left ==
            std::vector<std::string>{"Linear", "ReLU", "Linear", "ReLU", "Sequential"});
      for (size_t i = 0; i < fused.size(); ++i) {
        CAPTURE(i);
        CHECK(same_bits(fused[i], observed[i]));
      }
    }
}

TEST_CASE("CallObserver: what it throws reaches the caller, and forward's own error goes first") {
  struct Throws : nn::CallObserver {
    bool enters = false;
    void enter(nn::Module&) override {
      if (enters) throw ValueError("entered");
    }
    void leave(nn::Module&, const Tensor*) override { throw ValueError("left"); }
  };
  nn::Linear layer{2, 2};
  {
    Throws observer;
    CHECK(contains(error_of([&] { layer(zeros({1, 2})); }), "left"));
    CHECK(contains(error_of([&] { layer(zeros({1, 3})); }), "linear: input [1, 3]"));
    observer.enters = true;
    CHECK(contains(error_of([&] { layer(zeros({1, 2})); }), "entered"));
  }
  CHECK(layer(zeros({1, 2})).shape() == Shape{1, 2});
}

TEST_CASE("CallObserver: observers may go in any order, and during a call") {
  nn::Linear layer{2, 2};
  const Tensor x = zeros({1, 2});
  auto first = std::make_unique<Watch>(), second = std::make_unique<Watch>();
  first.reset();
  layer(x);
  CHECK(second->left == std::vector<std::string>{"Linear"});
  second.reset();
  CHECK_NOTHROW(layer(x));

  auto outer = std::make_unique<Watch>(), inner = std::make_unique<Watch>();
  nn::Sequential net{Calls([&] { inner.reset(); }), nn::Linear{2, 2}};
  net(x);
  CHECK(outer->left == std::vector<std::string>{"Linear"});  // the others were the inner one's
}

TEST_CASE("operator(): a module may call itself") {
  Recursive net;
  const Tensor x = randn({3, 2});
  CHECK(same_bits(net(x, 2), net.fc(net.fc(x))));
  CHECK_NOTHROW(net(x, 5).sum().backward());
  CHECK(contains(error_of([&] { net(zeros({1, 3}), 2); }), "in Recursive.fc (Linear 2->2)"));
}

TEST_CASE("operator(): an exception of any type passes unchanged and leaves the modules usable") {
  nn::Sequential net{Throws(), nn::ReLU{}};
  Throws& part = net.at<Throws>(0);
  const Tensor x = randn({3, 2});
  struct Count : nn::CallObserver {
    int depth = 0;
    void enter(nn::Module&) override { ++depth; }
    void leave(nn::Module&, const Tensor*) override { --depth; }
  };
  for (const bool observed : {false, true}) {
    std::optional<Count> count;
    if (observed) count.emplace();
    part.how = 1;
    CHECK_THROWS_AS(net(x), int);
    part.how = 2;
    CHECK_THROWS_AS(net(x), std::bad_alloc);
    part.how = 3;
    CHECK_THROWS_AS(net(x), std::out_of_range);
    part.how = 0;
    CHECK(same_bits(net(x), relu(part.fc(x))));
    CHECK(error_of([&] { net(zeros({1, 3})); }).ends_with("\n  in Sequential.0.fc (Linear 2->2)"));
    CHECK(part(x).requires_grad());
    if (observed) CHECK(count->depth == 0);
  }
}

TEST_CASE("operator(): an error keeps its text where its place cannot be told") {
  BadBrief bad{2, 2};
  const std::string text = error_of<ShapeError>([&] { bad(zeros({1, 3})); });
  CHECK(contains(text, "linear: input [1, 3]"));
}

TEST_CASE("operator(): several threads may call one module in eval mode, from the first call on") {
  for (int round = 0; round < 10; ++round) {
    nn::Sequential net{nn::Conv2d{1, 4, 3}, nn::BatchNorm2d{4}, nn::ReLU{},       nn::Flatten{},
                       nn::Linear{16, 8},   nn::ReLU{},         nn::Dropout{0.5}, nn::Linear{8, 3}};
    net.eval();
    const Tensor x = randn({5, 1, 4, 4});
    std::vector<Tensor> results(4);
    std::vector<std::thread> threads;
    for (Tensor& y : results)
      threads.emplace_back([&net, &x, &y] {
        for (int i = 0; i < 5; ++i) y = net(x);
      });
    for (std::thread& t : threads) t.join();
    const Tensor want = net(x);
    for (const Tensor& y : results) CHECK(same_bits(y, want));
  }
}

TEST_CASE("EvalGuard: each module has its own mode again, also after an exception") {
  nn::Sequential net{nn::Linear{2, 2}, nn::BatchNorm1d{2}, nn::Sequential{nn::Dropout{0.5}}};
  net[1].eval();  // frozen
  const auto modes = [&] {
    std::vector<bool> all;
    for (auto& [name, m] : net.named_modules()) all.push_back(m->is_training());
    return all;
  };
  const std::vector<bool> before{true, true, false, true, true}, none(5, false);
  CHECK(modes() == before);
  {
    const nn::EvalGuard guard(net);
    CHECK(modes() == none);
    {
      const nn::EvalGuard again(net);
      net.train();
    }
    CHECK(modes() == none);
  }
  CHECK(modes() == before);
  CHECK_THROWS_AS(
      [&] {
        const nn::EvalGuard guard(net);
        net(zeros({1, 3}));
      }(),
      ShapeError);
  CHECK(modes() == before);
}

TEST_CASE("eval: a batch norm that is frozen inside a net in training keeps its statistics") {
  nn::Sequential net{nn::Linear{2, 2}, nn::BatchNorm1d{2}, nn::BatchNorm1d{2}};
  nn::BatchNorm1d &frozen = net.at<nn::BatchNorm1d>(1), &trained = net.at<nn::BatchNorm1d>(2);
  frozen.eval();
  net(randn({8, 2})).sum().backward();
  CHECK(frozen.num_batches_tracked.item<int64_t>() == 0);
  CHECK(difference(frozen.running_mean, zeros({2})) == 0);
  CHECK(trained.num_batches_tracked.item<int64_t>() == 1);
  CHECK(difference(trained.running_mean, zeros({2})) > 0);
  CHECK(frozen.weight.grad().defined());
  CHECK(!net.clone().at<nn::BatchNorm1d>(1).is_training());
}

namespace {

struct Hidden : nn::Module {
  Tensor weight = ones({2}).requires_grad_();  // in no field
  bool fails = true;
  Tensor forward(const Tensor& x) {
    if (fails) throw std::runtime_error("not yet");
    return x * weight;
  }
  LOCKSTEP_MODULE(Hidden)
};
struct OneLayer : nn::Module {
  nn::Linear fc{4, 2};
  Tensor forward(Tensor x) { return fc(x); }
  LOCKSTEP_MODULE(OneLayer, fc)
};

}  // namespace

TEST_CASE("call: leaves of no field are looked for until a call has succeeded") {
  Hidden net;
  CHECK_THROWS_AS(net(ones({2})), std::runtime_error);
  net.fails = false;
  CHECK_THROWS_AS(net(ones({2})), Error);
}

TEST_CASE("call: an argument with a graph from another thread is no hidden leaf") {
  const Tensor w = ones({4}).requires_grad_();
  Tensor many = w;
  for (int i = 0; i < 1000; ++i) many = many * 1.0;
  const Tensor x = (w * 2.0).view({1, 4});
  std::string error;
  std::thread([&] {
    try {
      OneLayer net;
      net(x).sum().backward();
    } catch (const std::exception& e) {
      error = e.what();
    }
  }).join();
  CHECK(error == "");
  CHECK(w.grad().defined());
}

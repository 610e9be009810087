// In-place ops, views and their bases: who sees a change, and where the gradient goes. The expected
// gradients are those of the same program written out of place, and finite differences.
#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/nn/layer_norm.h>
#include <lockstep/nn/linear.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/join.h>
#include <lockstep/tensor/ops/layer_norm.h>
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/random.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor f64(const V& v, const Shape& shape) { return tensor(v, shape); }
Tensor f64(const V& v) { return tensor(v); }
Tensor buffer(const Shape& shape) { return zeros(shape, {.dtype = DType::f64}); }

/// Both derivatives of a program of two inputs, [3, 2] and [2], against finite differences.
template <class F>
void check_derivatives(F program) {
  const Tensor a = f64({0.3, -1.2, 0.7, 2.1, -0.4, 0.9}, {3, 2}).requires_grad_();
  const Tensor b = f64({1.5, -0.8}).requires_grad_();
  const auto f = [&](const std::vector<Tensor>& in) { return program(in[0], in[1]); };
  CHECK_NOTHROW(autograd::gradcheck(f, {a, b}));
  CHECK_NOTHROW(autograd::gradgradcheck(f, {a, b}));
}

}  // namespace

TEST_CASE("copy_ into a slice of a tensor without graph gives that tensor a graph") {
  const Tensor w = full({2}, 3).requires_grad_();
  Tensor y = zeros({3, 2});
  y[1].copy_(w * 2.0);
  CHECK(y.requires_grad());
  Tensor loss = y.sum() + (w * 0.5).sum();
  loss.backward();
  CHECK(loss.item<double>() == 15);
  CHECK(values(w.grad()) == V{2.5, 2.5});
}

TEST_CASE("copy_ into a base reaches a view that was made before") {
  const Tensor u = full({2}, 3).requires_grad_();
  Tensor z = zeros({2});
  const Tensor view = z.view({2, 1}), part = view[1];
  z.copy_(u * 2.0);
  CHECK(part.requires_grad());
  (view.sum() + part.sum()).backward();
  CHECK(values(u.grad()) == V{2, 4});
}

TEST_CASE("a result gathered row by row differentiates to every row's input") {
  nn::Linear l{1, 1, {.bias = false}};
  {
    NoGradGuard g;
    l.weight.fill_(1);
  }
  Tensor out = zeros({4, 1});
  for (int i = 0; i < 4; ++i) out[i].copy_(l(full({1, 1}, i + 1))[0]);
  (out.square().sum() + l.weight.square().sum() * 0.5).backward();
  CHECK(l.weight.grad().item<double>() == 2 * (1 + 4 + 9 + 16) + 1);
}

TEST_CASE("x[0] = y writes into x; x = y makes x refer to y") {
  Tensor x = zeros({2, 2});
  x[0] = tensor(std::vector<float>{1, 2});
  x[1] = 7;
  CHECK(values(x) == V{1, 2, 7, 7});
  x.narrow(1, 1, 1) = 0.5;
  CHECK(values(x) == V{1, 0.5, 7, 0.5});
  const Tensor other = ones({3});
  x = other;
  CHECK(x.is_same(other));

  Tensor w = ones({2}).requires_grad_();
  (w * 2.0).sum().backward();
  w.grad() = full({2}, 9);
  CHECK(values(w.grad()) == V{9, 9});

  const Tensor v = ones({2}).requires_grad_();
  Tensor y = zeros({3, 2});
  y[2] = v * 4.0;
  y.sum().backward();
  CHECK(values(v.grad()) == V{4, 4});
}

TEST_CASE("in-place ops on views: derivatives of whole programs") {
  SUBCASE("a row of a result, multiplied") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = a * a;
      y[1].mul_(b);
      return y * y;
    });
  }
  SUBCASE("the base, under its views") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = a * 1.0;
      const Tensor row = y[2], column = y.narrow(1, 0, 1);
      y.mul_(b);
      return row * row * column;
    });
  }
  SUBCASE("two views that overlap, in turns") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = a * 1.0, row = y[1], column = y.t()[0];
      row.mul_(b);
      column.mul_(column);
      row.add_(b * b);
      return y * y + row * column.sum();
    });
  }
  SUBCASE("a view of a view, through transposes and steps") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = buffer({4, 4});
      Tensor part = y.t().slice(0, {1, 4, 2}).narrow(1, 1, 2);  // [2, 2]
      part.copy_(b.unsqueeze(1) * a.narrow(0, 0, 2));
      part[0].mul_(part[1].clone());
      return y.square();
    });
  }
  SUBCASE("functions whose derivative reads what was there before") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = a * 1.0, row = y[0];
      Tensor last = y[2];
      last *= last;
      last *= b;
      sigmoid_(row);  // saves its result, which nothing may change afterwards
      return y * a;
    });
  }
  SUBCASE("one view into another of the same base") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = a * 1.0;
      y[0].copy_(y[2]);
      y[1].add_(y[0].clone() * b);
      y.narrow(0, 0, 2).copy_(y.narrow(0, 1, 2));  // overlapping
      return y * y;
    });
  }
  SUBCASE("fill_ and zero_ cut the gradient of what they overwrite") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = a * b;
      y[1].fill_(2.0);
      y.narrow(1, 1, 1).zero_();
      return y * a + y;
    });
  }
  SUBCASE("a detached slice is a base of its own") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = buffer({3, 4});
      Tensor d = y.slice(1, {0, 4, 2}).detach();  // [3, 2] with gaps
      d[1] = b;
      d.t()[0].add_(a.t()[1]);
      return d * d;
    });
  }
  SUBCASE("h += x after linear on three dimensions and after layer_norm") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      const Tensor x = stack({a, a * b}, 0);  // [2, 3, 2]
      Tensor h = linear(x, a, Tensor());      // [2, 3, 3]
      h += sum(x, {2}, true);
      Tensor n = layer_norm(x, {2}, b, Tensor(), 1e-3);
      n += x;
      relu_(n);
      return h.sum() * n;
    });
  }
  SUBCASE("an expanded view is read out of its changed base") {
    check_derivatives([](const Tensor& a, const Tensor& b) {
      Tensor y = b * 1.0;
      const Tensor wide = y.unsqueeze(0).expand({3, 2});
      y.mul_(b);
      return wide * a;
    });
  }
}

TEST_CASE("in-place ops refuse leaves, views of leaves, repeated elements and unknown bases") {
  Tensor w = f64({1, 2}).requires_grad_();
  CHECK_THROWS_WITH_AS(w.add_(1), Contains("leaf that requires grad"), AutogradError);
  CHECK_THROWS_WITH_AS(w.fill_(1), Contains("leaf that requires grad"), AutogradError);
  CHECK_THROWS_WITH_AS(w[0].fill_(1), Contains("view of a leaf"), AutogradError);
  CHECK_THROWS_WITH_AS(w.narrow(0, 0, 1).copy_(w.narrow(0, 1, 1)), Contains("view of a leaf"),
                       AutogradError);
  Tensor wide = (w * 1.0).unsqueeze(0).expand({3, 2});
  CHECK_THROWS_WITH_AS(wide.mul_(2), Contains("repeats its elements"), ShapeError);
  Tensor base = buffer({2, 2}), unknown;
  {
    NoGradGuard g;
    unknown = base[0];
    w[0].fill_(5);  // allowed: nothing is recorded
    unknown.copy_(w.detach());
  }
  CHECK(values(w) == V{5, 2});
  CHECK_THROWS_WITH_AS(unknown.copy_(w), Contains("NoGradGuard"), AutogradError);
  CHECK_NOTHROW(unknown.mul_(2));  // records nothing
  CHECK(values(base) == V{10, 4, 0, 0});
}

TEST_CASE("in-place ops: what backward saved and what was changed since is an error") {
  const Tensor w = f64({1, 2}).requires_grad_();
  Tensor y = w * 1.0;
  const Tensor z = y * y;
  y[0].add_(1);
  CHECK_THROWS_WITH_AS(z.sum().backward(), Contains("changed in place"), AutogradError);
}

TEST_CASE("requires_grad_ on a view makes it a leaf, apart from its base") {
  Tensor base = buffer({2, 2});
  Tensor row = base[0];
  row.requires_grad_();
  base.add_(1);
  CHECK(row.is_leaf());
  (row * 3.0).sum().backward();
  CHECK(values(row.grad()) == V{3, 3});
}

TEST_CASE("TensorBody: in-place ops leave no reference cycle") {
  Ref<Storage> storage;
  {
    const Tensor w = f64({1, 2}).requires_grad_();
    Tensor x = w * 2.0;
    storage = Ref<Storage>(&x.storage());
    x.add_(x * w);  // its node saves x as it was
    x[0].mul_(x[1]);
    const Tensor view = x.view({2, 1});
    x.add_(view.t()[0]);
  }
  CHECK(storage->use_count() == 1);
}

TEST_CASE("Leaf: a gradient made with create_graph goes when its tensor goes") {
  Ref<Storage> storage;
  {
    const Tensor w = f64({1, 2}).requires_grad_();
    storage = Ref<Storage>(&w.storage());
    (w * w * w).sum().backward({}, {.create_graph = true});
    CHECK(w.grad().requires_grad());
  }
  CHECK(storage->use_count() == 1);
}

TEST_CASE("Leaf: a gradient lies in memory as its tensor does") {
  const Tensor x = randn({2, 3, 4}).permute({2, 0, 1}).detach().requires_grad_();
  (x * 2.0).sum().backward();
  CHECK(x.grad().strides() == x.strides());
  (x * 2.0).permute({1, 2, 0}).contiguous().sum().backward();
  CHECK(x.grad().strides() == x.strides());
  CHECK(values(x.grad()) == V(24, 4));
}

TEST_CASE("what a hook or a caller keeps of a gradient does not change") {
  const Tensor w = f64({1, 2}).requires_grad_();
  Tensor of_hook;
  w.register_hook([&](const Tensor& g) {
    of_hook = g;
    return Tensor();
  });
  auto loss = [&] { return (w * 2.0).sum(); };
  loss().backward();
  const Tensor first = of_hook, kept = w.grad(), part = w.grad()[0];
  loss().backward();
  CHECK(values(w.grad()) == V{4, 4});
  CHECK(values(first) == V{2, 2});
  CHECK(values(kept) == V{2, 2});
  const Tensor sum = w.grad();
  w.leaf()->zero_grad(false);
  CHECK(values(sum) == V{4, 4});
  CHECK(values(w.grad()) == V{0, 0});
  CHECK(part.item<double>() == 2);
}

TEST_CASE("HookHandle keeps neither tensor nor graph alive") {
  HookHandle on_tensor, on_leaf;
  Ref<Storage> storage;
  {
    const Tensor w = f64({1, 2}).requires_grad_();
    storage = Ref<Storage>(&w.storage());
    on_leaf = w.register_post_accumulate_grad_hook([](const Tensor&) {});
    on_tensor = (w * w).register_hook([](const Tensor& g) { return g; });
  }
  CHECK(storage->use_count() == 1);
  on_tensor.remove();
  on_leaf.remove();
}

TEST_CASE("Leaf: threads that run backward through one leaf lose no gradient") {
  constexpr int kThreads = 4, kRounds = 300;
  const Tensor w = zeros({64}).requires_grad_();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) (w * 1.0).sum().backward();
    });
  for (std::thread& t : threads) t.join();
  CHECK(values(w.grad()) == V(64, kThreads * kRounds));
}

// ---- what forward keeps beside inputs and output ----

namespace {

struct WithKept {
  static constexpr const char* name = "with_kept";
  static constexpr unsigned saves = 0;
  Tensor* seen = nullptr;
  Tensor forward(Saver& saved, const Tensor& x) const {
    const Tensor factor = x * 0.0 + 3.0;
    saved.keep(1, factor);
    if (seen) *seen = factor;
    return x * factor;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy * saved.kept(1));
  }
};

enum class Mistake { reads_unsaved, sets_nothing, sets_undefined, wrong_dtype, reads_unkept };
struct Mistaken {
  static constexpr const char* name = "mistaken";
  static constexpr unsigned saves = 0;
  Mistake mistake;
  Tensor forward(const Tensor& x) const { return x * 2.0; }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    switch (mistake) {
      case Mistake::reads_unsaved:
        return dx.set(0, saved.input(0));
      case Mistake::sets_nothing:
        return;
      case Mistake::sets_undefined:
        return dx.set(0, Tensor());
      case Mistake::wrong_dtype:
        return dx.set(0, dy.to(DType::f32));
      case Mistake::reads_unkept:
        return dx.set(0, saved.kept(0));
    }
  }
};
struct NoGradient {
  static constexpr const char* name = "no_gradient";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) const { return x * 2.0; }
  void backward(const Saved&, const Tensor&, InputGradients& dx) const { dx.none(0); }
};

}  // namespace

TEST_CASE("Saver::keep: kept tensors are version-checked and freed with the graph") {
  const Tensor x = f64({1, 2}).requires_grad_();
  Tensor factor;
  Tensor y = apply(WithKept{&factor}, x);
  CHECK(values(autograd::grad({y}, {x}, {ones({2}, {.dtype = DType::f64})})[0]) == V{3, 3});
  CHECK_THROWS_WITH_AS(autograd::grad({y}, {x}, {ones({2}, {.dtype = DType::f64})}),
                       Contains("freed by an earlier backward"), AutogradError);
  CHECK(factor.storage().use_count() == 1);
  y = apply(WithKept{&factor}, x);
  factor.add_(1);
  CHECK_THROWS_WITH_AS(y.sum().backward(), Contains("changed in place"), AutogradError);
}

TEST_CASE("max: its indices are saved, so changing them is an error and not a stray write") {
  const Tensor x = randn({4, 4}).requires_grad_();
  auto [v, i] = max(x, 1);
  i.add_(1000000);
  CHECK_THROWS_WITH_AS(v.sum().backward(), Contains("changed in place"), AutogradError);
}

TEST_CASE("backward of a user's op: mistakes are named") {
  const Tensor x = f64({1, 2}).requires_grad_();
  const auto run = [&](Mistake m) { apply(Mistaken{m}, x).sum().backward(); };
  CHECK_THROWS_WITH_AS(run(Mistake::reads_unsaved), Contains("add kInput(0)"), AutogradError);
  CHECK_THROWS_WITH_AS(run(Mistake::sets_nothing), Contains("did not set the gradient of input 0"),
                       AutogradError);
  CHECK_THROWS_WITH_AS(run(Mistake::sets_undefined), Contains("dx.none(0)"), AutogradError);
  CHECK_THROWS_AS(run(Mistake::wrong_dtype), DTypeError);
  CHECK_THROWS_WITH_AS(run(Mistake::reads_unkept), Contains("Saver::keep"), AutogradError);
  apply(NoGradient{}, x).sum().backward();
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("sizes: products beyond 64 bits and negative sizes are refused everywhere") {
  constexpr int64_t big = int64_t{1} << 40;
  float memory[4] = {};
  CHECK_THROWS_AS(empty({big, big}), ShapeError);
  CHECK_THROWS_AS(empty({big, big, big}), ShapeError);
  CHECK_THROWS_AS(empty({int64_t{1} << 61, 2}), OutOfMemory);
  CHECK_THROWS_AS(zeros({-1}), ShapeError);
  CHECK_THROWS_AS(ones({1}).expand({big, big}), ShapeError);
  CHECK_THROWS_AS(ones({1}).expand({-2}), ShapeError);
  CHECK_THROWS_AS(from_blob(memory, {-4}), ShapeError);
  CHECK_THROWS_AS(from_blob(memory, {big, big}), ShapeError);
  CHECK_THROWS_AS(ones({4}).view({big, big}), ShapeError);
  CHECK_THROWS_AS(ones({4}).reshape({big, big, -1}), ShapeError);
  CHECK_THROWS_AS(arange(INT64_MIN, INT64_MAX), ShapeError);
  CHECK(values(arange(INT64_MAX - 2, INT64_MAX)).size() == 2);
  CHECK(arange(INT64_MAX - 2, INT64_MAX).to_vector<int64_t>()[1] == INT64_MAX - 1);
  CHECK(values(arange(0, 5).slice(0, {.start = 1, .step = INT64_MAX})) == V{1});
  CHECK_THROWS_AS(scalar(1).size(0), IndexError);
  CHECK_THROWS_AS(scalar(1).size(-1), IndexError);
  CHECK(full({2}, (int64_t{1} << 53) + 1, {.dtype = DType::i64}).to_vector<int64_t>()[1] ==
        (int64_t{1} << 53) + 1);
}

TEST_CASE("in place: an operand that only a constant's derivative would read may be changed") {
  const Tensor a = f64({0.3, -1.2, 0.7, 2.1}, {2, 2}).requires_grad_();
  const Tensor constant = f64({1.5, -0.5, 2, 4}, {2, 2});
  using Op = Tensor (*)(const Tensor&, const Tensor&);
  const struct {
    const char* name;
    Op op;
    V gradient;  // of the sum, by the first operand
  } ops[] = {
      {"mul", [](const Tensor& x, const Tensor& c) { return x * c; }, {1.5, -0.5, 2, 4}},
      {"div", [](const Tensor& x, const Tensor& c) { return x / c; }, {1 / 1.5, -2, 0.5, 0.25}},
      {"matmul", [](const Tensor& x, const Tensor& c) { return matmul(x, c); }, {1, 6, 1, 6}},
      {"matmul of the constant",
       [](const Tensor& x, const Tensor& c) { return matmul(c, x); },
       {3.5, 3.5, 3.5, 3.5}},
      {"linear",
       [](const Tensor& x, const Tensor& c) { return linear(x, c, Tensor()); },
       {3.5, 3.5, 3.5, 3.5}},
      {"conv2d",
       [](const Tensor& x, const Tensor& c) {
         return conv2d(x.view({1, 1, 2, 2}), c.view({1, 1, 2, 2}));
       },
       {1.5, -0.5, 2, 4}},
      {"mul_",
       [](const Tensor& x, const Tensor& c) { return x.clone().mul_(c); },
       {1.5, -0.5, 2, 4}},
  };
  for (const auto& [name, op, gradient] : ops) {
    const auto& shown_name = name;  // clang 14 captures no structured binding
    CAPTURE(std::string(shown_name));
    Tensor h = a * 1.0;
    const Tensor y = op(h, constant);
    h.zero_();  // backward reads the constant only
    CHECK(values(autograd::grad({y.sum()}, {a})[0]) == gradient);

    Tensor used = a * 1.0;
    const Tensor parameter = constant.clone().requires_grad_();
    const Tensor z = op(used, parameter);
    used.zero_();
    if (std::string(name) == "mul_")  // its node saved a copy
      CHECK_NOTHROW(z.sum().backward());
    else
      CHECK_THROWS_WITH_AS(z.sum().backward(), Contains("was changed in place since"),
                           AutogradError);
    Tensor changed = constant.clone();
    const Tensor w = op(a * 1.0, changed);
    changed.zero_();
    CHECK_THROWS_AS(w.sum().backward(), AutogradError);
  }
}

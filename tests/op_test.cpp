// apply(): ops that users write, what the entry point does for them, and the check of their
// derivatives.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;
using autograd::grad;
using autograd::gradcheck;
using autograd::gradgradcheck;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Inputs = const std::vector<Tensor>&;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor leaf(const V& v) { return tensor(v).requires_grad_(); }

/// y = a^2 b; the right factors are 2 and 1.
struct SquareTimes {
  static constexpr const char* name = "square_times";
  static constexpr unsigned saves = kInput(0) | kInput(1);
  double factor_a = 2, factor_b = 1;
  Tensor forward(const Tensor& a, const Tensor& b) const {
    CHECK_FALSE(is_grad_enabled());
    return a * a * b;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor &a = saved.input(0), &b = saved.input(1);
    if (dx.needed(0)) dx.set(0, dy * a * b * factor_a);
    if (dx.needed(1)) dx.set(1, dy * a * a * factor_b);
  }
};

/// exp, whose derivative reads its own output.
struct OwnExp {
  static constexpr const char* name = "own_exp";
  static constexpr unsigned saves = kOutput;
  Tensor forward(const Tensor& x) const { return exp(x); }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy * saved.output());
  }
};

/// x + bias, where the bias may be absent.
struct AddBias {
  static constexpr const char* name = "add_bias";
  static constexpr unsigned saves = kInput(0) | kInput(1);
  Tensor forward(const Tensor& x, const Tensor& bias) const {
    return bias.defined() ? x + bias : x.clone();
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if (dx.needed(0)) dx.set(0, dy);
    if (dx.needed(1)) dx.set(1, dy);
    CHECK_FALSE(saved.input(1).defined());
  }
};

/// The sum, with a gradient that is one number seen many times.
struct LazySum {
  static constexpr const char* name = "lazy_sum";
  static constexpr unsigned saves = 0;
  Shape from = {};
  Tensor forward(const Tensor& x) {
    from = x.shape();
    return x.sum();
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    Tensor g = (dy * 1.0).expand(from);
    dx.set(0, std::move(g));
  }
};

/// Gives its input a gradient of the wrong shape.
struct Misshapen {
  static constexpr const char* name = "misshapen";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) const { return x.clone(); }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const { dx.set(0, dy.sum()); }
};

/// Where the values are positive: not differentiable.
struct IsPositive {
  static constexpr const char* name = "is_positive";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) const { return gt(x, 0); }
  void backward(const Saved&, const Tensor&, InputGradients&) const {}
};

/// A transpose whose backward forgets to transpose.
struct Swapped {
  static constexpr const char* name = "swapped";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) const { return x.view({2, 2}).t().contiguous(); }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy.contiguous().view({4}));
  }
};

/// x^3 with a right derivative whose own derivative is wrong.
struct Cube {
  static constexpr const char* name = "cube";
  static constexpr unsigned saves = kInput(0);
  Tensor forward(const Tensor& x) const { return x * x * x; }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy * saved.input(0) * saved.input(0).detach() * 3.0);  // half of its graph is missing
  }
};

/// x^2 with a right derivative for when nothing is recorded, and another, consistent in itself, for
/// when it is.
struct TwoBackwards {
  static constexpr const char* name = "two_backwards";
  static constexpr unsigned saves = kInput(0);
  Tensor forward(const Tensor& x) const { return x * x; }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy * saved.input(0) * (is_grad_enabled() ? 3.0 : 2.0));
  }
};

}  // namespace

// ---- a user's own op ----

TEST_CASE(
    "a struct with forward and backward is an op, differentiable as often as its backward is") {
  const Tensor a = leaf({1, 2}), b = leaf({3, 4});
  const Tensor y = apply(SquareTimes{}, a, b);
  CHECK(values(y) == V{3, 16});
  CHECK(std::string(y.node()->name()) == "square_times");
  y.sum().backward();
  CHECK(values(a.grad()) == V{6, 16});
  CHECK(values(b.grad()) == V{1, 4});
  const auto f = [](Inputs in) { return apply(SquareTimes{}, in[0], in[1]); };
  CHECK_NOTHROW(gradcheck(f, {a, b}));
  CHECK_NOTHROW(gradgradcheck(f, {a, b}));
}

TEST_CASE("an op that saves its output connects it again for second derivatives") {
  const auto f = [](Inputs in) { return apply(OwnExp{}, in[0]); };
  CHECK_NOTHROW(gradcheck(f, {leaf({-1, 0.5})}));
  CHECK_NOTHROW(gradgradcheck(f, {leaf({-1, 0.5})}));
  Tensor y = apply(OwnExp{}, leaf({1}));
  y.add_(1);
  CHECK_THROWS_WITH_AS(y.backward(), Contains("own_exp"), AutogradError);
}

TEST_CASE("nothing is recorded or kept where no gradient is wanted") {
  const Tensor a = tensor(V{1, 2}), b = leaf({3, 4});
  CHECK_FALSE(apply(SquareTimes{}, a, a).requires_grad());
  const Tensor y = apply(SquareTimes{}, a, b);  // backward asks needed(0) and computes b's alone
  CHECK_FALSE(y.node()->inputs[0]);
  y.sum().backward();
  CHECK(values(b.grad()) == V{1, 4});
  NoGradGuard off;
  CHECK_FALSE(apply(SquareTimes{}, b, b).requires_grad());
}

TEST_CASE("an absent input may be named in saves, and is undefined in backward") {
  const Tensor x = leaf({1, 2});
  const Tensor y = apply(AddBias{}, x, Tensor());
  CHECK_NOTHROW(y.sum().backward());
  CHECK(values(x.grad()) == V{1, 1});
}

TEST_CASE("a gradient that repeats one number does not become the tensor's own") {
  const Tensor x = leaf({1, 2});
  apply(LazySum{}, x).backward();
  CHECK_NOTHROW(x.grad().add_(tensor(V{1, 2})));
  CHECK(values(x.grad()) == V{2, 3});
  x.set_grad({});
  (x.square().sum() + apply(LazySum{}, x) + apply(LazySum{}, x)).backward();
  CHECK(values(x.grad()) == V{4, 6});
  x.set_grad({});
  const Tensor h = x * 1.0;
  (apply(LazySum{}, h * 2.0 + h) + (h * h).sum()).backward();
  CHECK(values(x.grad()) == V{5, 7});
}

TEST_CASE("a gradient of the wrong shape is found out by name") {
  const Tensor x = leaf({1, 2});
  CHECK_THROWS_WITH_AS(apply(Misshapen{}, x).sum().backward(), Contains("misshapen"), ShapeError);
  CHECK_THROWS_WITH_AS(apply(Misshapen{}, x).sum().backward(), Contains("[2]"), ShapeError);
}

TEST_CASE("a result that is not floating has no gradient") {
  const Tensor y = apply(IsPositive{}, leaf({-1, 1}));
  CHECK(y.dtype() == DType::boolean);
  CHECK_FALSE(y.requires_grad());
}

// ---- gradcheck ----

TEST_CASE("gradcheck finds a wrong derivative, names its place and shows both values") {
  const auto wrong_a = [](Inputs in) { return apply(SquareTimes{.factor_a = 2.1}, in[0], in[1]); };
  CHECK_THROWS_AS(gradcheck(wrong_a, {leaf({1, 2}), leaf({3, 4})}), AutogradError);
  CHECK_THROWS_WITH_AS(gradcheck(wrong_a, {leaf({1, 2}), leaf({3, 4})}), Contains("input 0"),
                       AutogradError);
  CHECK_THROWS_WITH_AS(gradcheck(wrong_a, {leaf({0, 2}), leaf({3, 4})}), Contains("element 1"),
                       AutogradError);
  const auto wrong_b = [](Inputs in) { return apply(SquareTimes{.factor_b = 0}, in[0], in[1]); };
  CHECK_THROWS_WITH_AS(gradcheck(wrong_b, {leaf({1, 2}), leaf({3, 4})}), Contains("input 1"),
                       AutogradError);
  CHECK_NOTHROW(
      gradcheck(wrong_b, {leaf({1, 2}), tensor(V{3, 4})}));  // not by what requires no grad
}

TEST_CASE("gradcheck sees elements that trade places, which a plain sum would not") {
  CHECK_THROWS_AS(
      gradcheck([](Inputs in) { return apply(Swapped{}, in[0]); }, {leaf({1, 2, 3, 4})}),
      AutogradError);
}

TEST_CASE("gradgradcheck finds a wrong second derivative behind a right first one") {
  const auto f = [](Inputs in) { return apply(Cube{}, in[0]); };
  CHECK_NOTHROW(gradcheck(f, {leaf({1, 2})}));
  CHECK_THROWS_AS(gradgradcheck(f, {leaf({1, 2})}), AutogradError);
}

TEST_CASE("gradgradcheck finds a recorded backward that differs from the one by kernels") {
  const auto f = [](Inputs in) { return apply(TwoBackwards{}, in[0]); };
  CHECK_NOTHROW(gradcheck(f, {leaf({1, 2})}));
  CHECK_THROWS_WITH_AS(gradgradcheck(f, {leaf({1, 2})}), Contains("recorded"), AutogradError);
}

TEST_CASE("gradcheck asks for f64 and for something to check") {
  const auto f = [](Inputs in) { return in[0] * 2.0; };
  CHECK_THROWS_AS(gradcheck(f, {ones({2}).requires_grad_()}), DTypeError);
  CHECK_THROWS_AS(gradcheck(f, {tensor(V{1})}), AutogradError);
}

namespace {

struct Reverse {  // of the gradient
  static constexpr const char* name = "reverse";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) const { return x; }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const { dx.set(0, neg(dy)); }
};
/// Returns a view of its input.
struct FirstRow {
  static constexpr const char* name = "first_row";
  static constexpr unsigned saves = 0;
  Shape from = {};
  Tensor forward(const Tensor& x) {
    from = x.shape();
    return x[0];
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    Tensor g = zeros(from, {.dtype = dy.dtype()});
    g[0].copy_(dy);
    dx.set(0, g);
  }
};
struct Writes {  // to an input, though it is no op in place
  static constexpr const char* name = "writes";
  static constexpr unsigned saves = 0;
  int input = 0;
  Tensor forward(const Tensor& a, const Tensor& b) const {
    Tensor(input ? b : a).mul_(2);
    return a + b;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    if (dx.needed(0)) dx.set(0, dy);
    if (dx.needed(1)) dx.set(1, dy);
  }
};
/// Sets the gradient of the inputs with these numbers, one after the other.
struct Sets {
  static constexpr const char* name = "sets";
  static constexpr unsigned saves = 0;
  std::vector<int> numbers;
  Tensor forward(const Tensor& x, const Tensor& y) const { return x + y; }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    for (int i : numbers) dx.set(i, dy);
  }
};
struct Nothing {
  static constexpr const char* name = "nothing";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor&) const { return {}; }
  void backward(const Saved&, const Tensor&, InputGradients&) const {}
};

}  // namespace

TEST_CASE("apply: an input that forward returns as it is keeps its node") {
  const Tensor x = tensor<double>({1, 2}).requires_grad_();
  const Tensor h = x * 1.0, y = apply(Reverse{}, h);
  (h.sum() * 3.0 + y.sum()).backward();
  CHECK(x.grad().to_vector<double>() == V{2, 2});

  const Tensor leaf = tensor<double>({1, 2}).requires_grad_();
  Tensor z = apply(Reverse{}, leaf);
  CHECK(leaf.is_leaf());
  CHECK(z.data_ptr() == leaf.data_ptr());
  z.sum().backward();
  CHECK(leaf.grad().to_vector<double>() == V{-1, -1});
  CHECK_THROWS_AS(z.mul_(2), AutogradError);  // it lies over a leaf

  Tensor middle = x * 1.0;  // in place on the result reaches what it is a view of
  apply(Reverse{}, middle).mul_(3);
  CHECK(middle.to_vector<double>() == V{3, 6});
}

TEST_CASE("apply: a forward that changes an input whose gradient is recorded is an error") {
  const Tensor x = leaf({1, 2}), constant = tensor(V{3, 4});
  const Tensor h = x * 1.0;
  CHECK_THROWS_WITH_AS(apply(Writes{}, h, constant), Contains("changed input 0, of shape [2]"),
                       AutogradError);
  CHECK_THROWS_WITH_AS(apply(Writes{.input = 1}, constant, x), Contains("changed input 1"),
                       AutogradError);
  CHECK_NOTHROW(apply(Writes{.input = 1}, x, constant));  // statistics, say
  NoGradGuard off;
  CHECK_NOTHROW(apply(Writes{}, h, constant));
}

TEST_CASE("apply: an undefined result is an error that names the op") {
  const Tensor x = ones({2}).requires_grad_();
  CHECK_THROWS_WITH_AS(apply(Nothing{}, x), Contains("nothing: its forward returned"), Error);
}

TEST_CASE("apply: a view that forward makes of an input follows changes of either in place") {
  const Tensor x = tensor<double>({1, 2, 3, 4}, {2, 2}).requires_grad_();
  const Tensor factor = tensor<double>({5, 7});
  Tensor whole = x * 1.0, row = apply(FirstRow{}, whole);
  whole.mul_(factor);  // the base
  (row * 1.0).sum().backward();
  CHECK(row.to_vector<double>() == V{5, 14});
  CHECK(x.grad().to_vector<double>() == V{5, 7, 0, 0});

  Tensor other = x * 1.0, view = apply(FirstRow{}, other);
  view.mul_(factor);  // the view
  x.set_grad({});
  (other * 1.0).sum().backward();
  CHECK(x.grad().to_vector<double>() == V{5, 7, 1, 1});

  Tensor target = zeros({2, 2}, {.dtype = DType::f64});  // of a tensor without graph
  apply(FirstRow{}, target).copy_(x[1]);
  x.set_grad({});
  (target * 2.0).sum().backward();
  CHECK(x.grad().to_vector<double>() == V{0, 0, 2, 2});

  CHECK_THROWS_WITH_AS(apply(FirstRow{}, x).mul_(2), Contains("view of a leaf"), AutogradError);
}

TEST_CASE("backward of an op that sets a gradient twice, or of an input it lacks, is an error") {
  const Tensor x = ones({2}).requires_grad_(), y = ones({2}).requires_grad_();
  const auto run = [&](std::vector<int> numbers) {
    apply(Sets{std::move(numbers)}, x, y).sum().backward();
  };
  run({1, 0});
  CHECK_THROWS_WITH_AS(run({0, 1, 0}), Contains("sets: it sets the gradient of input 0 twice"),
                       AutogradError);
  CHECK_THROWS_WITH_AS(run({0, 1, 2}), Contains("sets: it names input 2, and the op has 2"),
                       AutogradError);
  CHECK_THROWS_WITH_AS(run({-1, 0, 1}), Contains("sets: it names input -1"), AutogradError);
}

// A gradient of another dtype than its leaf: set_grad_dtype().
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/lockstep.h>

using namespace lockstep;
using doctest::Contains;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }
Tensor half(const V& v) { return tensor(v).to(DType::bf16).requires_grad_(); }

/// x times a factor, computed in f32, whose gradient lands in the leaf's slot.
struct WideScale {
  static constexpr const char* name = "wide_scale";
  static constexpr unsigned saves = 0;
  static inline bool in_slot = false;
  static inline DType wanted = DType::f64;
  double factor;
  Tensor forward(const Tensor& x) const { return x.to(DType::f32) * factor; }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    wanted = dx.dtype(0);
    CHECK_FALSE(dx.destination(0).defined());  // none of the input's dtype
    const Tensor g = dy * factor;
    const Tensor place = dx.destination(0, g.dtype());
    in_slot = place.defined();
    if (in_slot) Tensor(place).copy_(g);
    dx.set(0, in_slot ? place : g);
  }
};

struct HalfNet : nn::Module {
  nn::Parameter w = zeros({2}, {.dtype = DType::bf16});
  Tensor forward(const Tensor& factor) { return (w.to(DType::f32) * factor).sum(); }
  LOCKSTEP_MODULE(HalfNet, w)
};

}  // namespace

TEST_CASE("set_grad_dtype: gradients add up in that dtype, unrounded") {
  const double fine = 1 + 0x1p-12;  // needs more digits than bf16 has
  Tensor p = half({1, 2});
  CHECK(p.grad_dtype() == DType::bf16);
  p.set_grad_dtype(DType::f32);
  CHECK(p.grad_dtype() == DType::f32);
  CHECK(p.dtype() == DType::bf16);
  const auto loss = [&] { return (p.to(DType::f32) * fine).sum(); };
  loss().backward();
  CHECK(p.grad().dtype() == DType::f32);
  CHECK(values(p.grad()) == V{fine, fine});
  loss().backward();
  CHECK(values(p.grad()) == V{2 * fine, 2 * fine});
  // Several contributions in one backward: each is converted, then they are added.
  p.set_grad({});
  (p.to(DType::f32) * 256.0 + p.to(DType::f32) * 1.0 + p.to(DType::f64) * fine).sum().backward();
  CHECK(values(p.grad()) == V{257 + fine, 257 + fine});  // bf16 would have 256 or 258
  Tensor q = half({1, 2});
  (q.to(DType::f32) * fine).sum().backward();
  CHECK(q.grad().dtype() == DType::bf16);
  CHECK(values(q.grad()) == V{1, 1});
}

TEST_CASE("a wider gradient of an f32 leaf adds up what f32 would lose") {
  Tensor p = ones({2}).requires_grad_();
  p.set_grad_dtype(DType::f64);
  (p * 16777216.0).sum().backward();
  for (int i = 0; i < 3; ++i) p.sum().backward();
  CHECK(values(p.grad()) == V{16777219, 16777219});
  p.set_grad({});
  p.backward(tensor(std::vector<float>{5, 6}));  // the leaf is the root
  CHECK(p.grad().dtype() == DType::f64);
  CHECK(values(p.grad()) == V{5, 6});
}

TEST_CASE("set_grad, hooks, grad(), create_graph and zero_grad go by the gradient's dtype") {
  Tensor p = half({1, 2});
  p.set_grad_dtype(DType::f32);
  CHECK_THROWS_WITH_AS(p.set_grad(ones({2}, {.dtype = DType::bf16})),
                       Contains("the gradient is bf16, the tensor bf16 with gradients in f32"),
                       DTypeError);
  p.set_grad(ones({2}));
  DType seen = DType::i64;
  HookHandle hook = p.register_hook([&](const Tensor& g) { return seen = g.dtype(), g * 2.0; });
  (p.to(DType::f32) * 3.0).sum().backward();
  CHECK(seen == DType::f32);
  CHECK(values(p.grad()) == V{7, 7});
  hook.remove();
  hook = p.register_hook([](const Tensor& g) { return g.to(DType::bf16); });
  CHECK_THROWS_WITH_AS(p.to(DType::f32).sum().backward(), Contains("gradients in f32"), DTypeError);
  hook.remove();
  p.body().leaf->zero_grad(false);
  CHECK(p.grad().dtype() == DType::f32);
  CHECK(values(p.grad()) == V{0, 0});
  const Tensor w = p.to(DType::f64);
  const Tensor g = autograd::grad({(w * w * w).sum()}, {p}, {}, {.create_graph = true})[0];
  CHECK(g.dtype() == DType::f32);
  p.set_grad({});
  g.sum().backward();
  CHECK(values(p.grad()) == V{6, 12});
  CHECK(p.grad().dtype() == DType::f32);
}

TEST_CASE("set_grad_dtype refuses what would not fit") {
  Tensor p = half({1, 2});
  p.to(DType::f32).sum().backward();
  CHECK_THROWS_WITH_AS(p.set_grad_dtype(DType::f32),
                       Contains("is to be f32, and the one that is there is bf16; clear it first"),
                       DTypeError);
  CHECK(p.grad_dtype() == DType::bf16);
  p.set_grad({});
  CHECK_THROWS_AS(p.set_grad_dtype(DType::i64), DTypeError);
  Tensor y = p.to(DType::f32);
  CHECK_THROWS_WITH_AS(y.set_grad_dtype(DType::f64), Contains("made by to"), AutogradError);
  Tensor frozen = ones({2});
  frozen.set_grad_dtype(DType::f64);
  CHECK_FALSE(frozen.requires_grad());
  frozen.requires_grad_();
  frozen.sum().backward();
  CHECK(frozen.grad().dtype() == DType::f64);
  Tensor back = half({1});
  back.set_grad_dtype(DType::f32).set_grad_dtype(DType::bf16);
  back.to(DType::f32).sum().backward();
  CHECK(back.grad().dtype() == DType::bf16);
}

TEST_CASE("an op is told the dtype, and may write into a slot that has it") {
  Tensor p = half({1, 2});
  p.set_grad_dtype(DType::f32);
  const Tensor slot = full({2}, 99);
  const double fine = 1 + 0x1p-12;
  p.leaf()->slot = slot;
  apply(WideScale{fine}, p).sum().backward();
  CHECK(WideScale::wanted == DType::f32);
  CHECK(WideScale::in_slot);
  CHECK(p.grad().is_same(slot));
  CHECK(values(slot) == V{fine, fine});
  p.to(DType::f32).sum().backward();  // adds to it
  CHECK(values(slot) == V{1 + fine, 1 + fine});
  CHECK(p.grad().is_same(slot));
  p.set_grad({});
  CHECK_THROWS_WITH_AS(p.set_grad_dtype(DType::bf16),
                       Contains("its place in DistributedDataParallel's memory is f32"),
                       DTypeError);
  p.leaf()->slot = Tensor();
}

TEST_CASE("ordinary ops do not get a slot of another dtype") {
  Tensor w = ones({2, 2}).requires_grad_();
  w.set_grad_dtype(DType::f64);
  const Tensor slot = full({2, 2}, 99, {.dtype = DType::f64});
  w.leaf()->slot = slot;
  const Tensor x = tensor(std::vector<float>{1, 2, 3, 4}, {2, 2});
  matmul(x, w).sum().backward();
  CHECK(w.grad().is_same(slot));
  CHECK(values(slot) == V{4, 4, 6, 6});
  w.leaf()->slot = Tensor();
}

TEST_CASE("optimizers and Module::to convert") {
  Tensor p = ones({2}).requires_grad_();
  p.set_grad_dtype(DType::f64);
  optim::SGD opt({p}, {.lr = 0.5});
  (p * tensor(std::vector<float>{1, 3})).sum().backward();
  opt.step();
  CHECK(values(p) == V{0.5, -0.5});
  nn::Linear net(2, 1);
  Tensor w = net.weight, b = net.bias;
  w.set_grad_dtype(DType::f64);
  net(ones({1, 2})).sum().backward();
  net.to(DType::bf16);
  CHECK(w.dtype() == DType::bf16);
  CHECK(w.grad().dtype() == DType::f64);
  CHECK(b.grad().dtype() == DType::bf16);
}

TEST_CASE("under DistributedDataParallel the buckets have the gradient's dtype") {
  const double fine = 1 + 0x1p-12;
  dist::run_local(2, [&](dist::Group group) {
    HalfNet inner;
    inner.w.set_grad_dtype(DType::f32);
    dist::DistributedDataParallel net{std::move(inner), group};
    net(full({1}, group.rank() == 0 ? fine : 1.0)).backward();
    const Tensor g = net.module().w.grad();
    const bool right = g.dtype() == DType::f32 && values(g) == V{1 + 0x1p-13, 1 + 0x1p-13};
    CHECK(right);
    const auto error = [&] {
      HalfNet other;
      if (group.rank() == 0) other.w.set_grad_dtype(DType::f32);
      try {
        dist::DistributedDataParallel wrapped{std::move(other), group};
      } catch (const DistError& e) {
        return std::string(e.what());
      }
      return std::string();
    }();
    const bool found = error.find("gradient f32") != error.npos;
    CHECK_MESSAGE(found, error);
  });
}

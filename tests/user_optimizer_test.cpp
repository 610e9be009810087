// Optimizers of the user's own: one made of tensor ops on Optimizer, one with a kernel on
// GroupedOptimizer. Groups, schedules, states and zero_grad work for them as for the library's.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include <lockstep/optim/optim.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>

using namespace lockstep;

namespace {

using V = std::vector<double>;
V values(const Tensor& t) { return t.to_vector<double>(); }

/// p -= lr * sign(m), m = beta * m + (1 - beta) * g: a state, and two groups with rates of their own.
class SignSGD final : public optim::Optimizer {
 public:
  explicit SignSGD(std::vector<std::vector<Tensor>> groups, V rates)
      : Optimizer(std::move(groups)), rates_(std::move(rates)) {}
  double beta = 0.5;
  void step() override {
    const NoGradGuard guard;
    for (Param& p : params_) {
      const Tensor g = p.tensor.grad();
      if (!g.defined()) continue;
      Tensor& m = p.state[0];
      if (!m.defined()) m = zeros_like(g);
      m = m * beta + g * (1 - beta);
      const Tensor sign = gt(m, 0).to(m.dtype()) - lt(m, 0).to(m.dtype());
      p.tensor.sub_(sign * rates_[static_cast<size_t>(p.group)]);
      ++p.steps();
    }
  }

 protected:
  std::vector<std::string> state_names() const override { return {"momentum"}; }
  int states(int) const override { return 1; }
  void visit_options(int group, const OptionVisitor& visit) override {
    visit("lr", rates_[static_cast<size_t>(group)]);
    visit("beta", beta);
  }
  double& lr_of(int group) override { return rates_[static_cast<size_t>(group)]; }

 private:
  V rates_;
};

struct CubicOptions {
  double lr = 1;
};
using CubicKernel =
    Kernel<void(const optim::ParameterUpdates&, const Ref<Cell<CubicOptions>>&)>;
CubicKernel cubic("CubicSGD", " step");
void cubic_cpu(const optim::ParameterUpdates& updates, const Ref<Cell<CubicOptions>>& options) {
  for (const auto& u : updates.list) {
    dispatch_floating("CubicSGD", u.parameter.dtype(), [&]<class T>(TypeTag<T>) {
      T *p = u.parameter.data<T>(), *g = u.gradient.data<T>();
      parallel_for(u.parameter.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          p[i] = static_cast<T>(p[i] - options->value.lr * g[i] * g[i] * g[i]);
      });
    });
    ++u.count->value.steps;
  }
}
const bool entered = cubic.set(DeviceType::cpu, cubic_cpu, dtypes::kFloats);

/// p -= lr * g^3.
class CubicSGD final : public optim::GroupedOptimizer<CubicOptions> {
 public:
  CubicSGD(std::vector<Tensor> params, CubicOptions options)
      : GroupedOptimizer({{std::move(params), options}}) {}

 protected:
  void update(int group, const optim::ParameterUpdates& updates) const override {
    cubic(updates, cell(group));
  }
  int states(int) const override { return 0; }
  std::vector<std::string> state_names() const override { return {}; }
  void visit_options(int group, const OptionVisitor& visit) override {
    visit("lr", options(group).lr);
  }
};

Tensor parameter(const V& v) { return tensor(v).requires_grad_(); }

}  // namespace

TEST_CASE("Optimizer: a subclass has groups, schedules, gradients to clear and a state") {
  const Tensor a = parameter({1, -2}), b = parameter({3});
  SignSGD opt{{{a}, {b}}, {0.5, 0.25}};
  optim::StepLR schedule{opt, {.step_size = 2, .gamma = 0.5}};
  const auto backward = [&] { (a.square().sum() + b.square().sum()).backward(); };
  for (int i = 0; i < 2; ++i) {
    opt.zero_grad();
    backward();
    opt.step();
    schedule.step();
  }
  CHECK(values(a) == V{0, -1});  // two steps of 0.5 against the gradients' signs
  CHECK(values(b) == V{2.5});
  CHECK(opt.lr(0) == 0.25);
  CHECK(opt.lr(1) == 0.125);

  const auto state = opt.state_dict();
  const Tensor a2 = parameter(values(a)), b2 = parameter(values(b));
  SignSGD other{{{a2}, {b2}}, {9, 9}};
  other.load_state_dict(state);
  CHECK(other.lr(1) == 0.125);
  opt.zero_grad();
  backward();
  opt.step();
  (a2.square().sum() + b2.square().sum()).backward();
  other.step();
  CHECK(values(a2) == values(a));
  CHECK(values(b2) == values(b));

  SignSGD moved = std::move(opt);
  schedule.step();
  schedule.step();
  CHECK(moved.lr(0) == 0.125);
  moved.zero_grad();
  CHECK_FALSE(a.grad().defined());
}

TEST_CASE(
    "FusedOptimizer: a subclass with a kernel of its own, for f32, f64 and any layout") {
  for (DType t : {DType::f32, DType::f64}) {
    const Tensor x = (arange(0, 70000).to(t) * 1e-4).requires_grad_();
    const Tensor w = (arange(0, 12).to(t) * 0.5).view({3, 4}).t().detach().requires_grad_();
    const Tensor unused = ones({2}, {.dtype = t}).requires_grad_();
    CubicSGD opt{{x, w, unused}, {.lr = 0.25}};
    const Tensor scale = arange(0, 12).to(t).view({4, 3});
    ((x * 2.0).sum() + (w * scale).sum()).backward();
    const V x0 = values(x), w0 = values(w);
    opt.step();
    const V x1 = values(x), w1 = values(w);
    for (size_t i = 0; i < x0.size(); i += 999) CHECK(std::fabs(x1[i] - (x0[i] - 2)) < 1e-6);
    for (size_t i = 0; i < w0.size(); ++i) {
      const double g = static_cast<double>(i);
      CHECK(std::fabs(w1[i] - (w0[i] - 0.25 * g * g * g)) < 1e-4);
    }
    CHECK(values(unused) == V{1, 1});
    opt.zero_grad();
    CHECK_FALSE(w.grad().defined());
  }
}

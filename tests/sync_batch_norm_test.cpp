// SyncBatchNorm: ranks that hold parts of a batch, even, uneven and empty ones, against plain batch
// norm on one process that has it all; numbers worked by hand; errors; and that nothing else changes.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include <lockstep/autograd/grad.h>
#include <lockstep/distributed/data_parallel.h>
#include <lockstep/distributed/local.h>
#include <lockstep/distributed/sync_batch_norm.h>
#include <lockstep/nn/nn.h>
#include <lockstep/tensor/ops.h>

#include "wrapped_group.h"

using namespace lockstep;
using namespace lockstep::dist;

namespace {

constexpr LocalOptions kSoon{.timeout = std::chrono::seconds(60)};

Tensor random_tensor(const Shape& shape, uint64_t seed, DType t, double mean = 0) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(mean, 1);
  std::vector<double> values(static_cast<size_t>(shape.numel()));
  for (double& v : values) v = normal(random);
  return tensor(values, shape).to(t);
}

double difference(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return INFINITY;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) most = std::max(most, std::abs(x[i] - y[i]));
  return most;
}

struct Counting : WrappedGroup {
  explicit Counting(std::shared_ptr<ProcessGroup> inner) : WrappedGroup(std::move(inner)) {}
  WorkPtr start(Collective call) override {
    ++*count;
    ++own;
    return inner_->start(std::move(call));
  }
  std::shared_ptr<ProcessGroup> child() override {
    auto made = std::make_shared<Counting>(inner_->child());
    made->count = count;
    return made;
  }
  std::shared_ptr<int> count = std::make_shared<int>(0);  // of this group and its children
  int own = 0;
};

/// Weight and bias away from ones and zeros.
template <class Norm>
Norm prepared(int64_t channels, nn::BatchNormOptions options) {
  Norm norm(channels, options);
  if (options.affine) {
    NoGradGuard guard;
    Tensor(norm.weight).copy_(random_tensor({channels}, 21, options.dtype, 1.5));
    Tensor(norm.bias).copy_(random_tensor({channels}, 22, options.dtype));
  }
  return norm;
}

struct Classifier : nn::Module {
  nn::Linear in{6, 8}, out{8, 3};
  nn::BatchNorm1d norm{8};
  Tensor forward(const Tensor& x) { return out(relu(norm(in(x)))); }
  LOCKSTEP_MODULE(Classifier, in, norm, out)
};
struct Twice : nn::Module {
  nn::Linear fc{4, 3};
  nn::BatchNorm1d first{3}, second{3};
  Tensor forward(const Tensor& x) { return second(relu(first(fc(x)))); }
  LOCKSTEP_MODULE(Twice, fc, first, second)
};
struct Nested : nn::Module {
  nn::BatchNorm2d a{4, {.eps = 0.5}};
  std::vector<nn::BatchNorm1d> list;
  nn::LayerNorm other{Shape{4}};
  Nested() { list.emplace_back(3); }
  LOCKSTEP_MODULE(Nested, a, list, other)
};

/// How a batch lies in memory.
enum class Order { dense, channels_last, permuted };

Tensor laid_out(const Tensor& x, Order order) {
  if (order == Order::dense) return x.contiguous();
  Shape to, back = Shape::filled(x.dim(), 0);
  if (order == Order::channels_last) {  // [N, C, ...] stored as [N, ..., C]
    to.push_back(0);
    for (int d = 2; d < x.dim(); ++d) to.push_back(d);
    to.push_back(1);
  } else {  // stored the other way round
    for (int d = x.dim() - 1; d >= 0; --d) to.push_back(d);
  }
  for (int d = 0; d < x.dim(); ++d) back[static_cast<int>(to[d])] = d;
  return x.permute(to).contiguous().permute(back);
}

/// What a training step gives: output, gradients, running statistics.
struct Step {
  Tensor y, dx, dweight, dbias, mean, var;
};

template <class Norm>
Step train(Norm& norm, const Tensor& x_values, const Tensor& dy) {
  const Tensor x = x_values.detach().requires_grad_();
  Step s;
  s.y = norm(x);
  s.y.backward(dy);
  s.dx = x.grad();
  if (norm.options.affine) s.dweight = norm.weight.grad(), s.dbias = norm.bias.grad();
  s.mean = norm.running_mean, s.var = norm.running_var;
  return s;
}

/// Two training steps on ranks with `rows[r]` samples each against one process with all of them.
template <class Norm>
void against_one_process(const std::vector<int64_t>& rows, Shape shape, DType t, Order order,
                         nn::BatchNormOptions options = {}) {
  CAPTURE(str_cat(shape, ' ', t));
  const int ranks = static_cast<int>(rows.size());
  shape[0] = 0;
  for (int64_t n : rows) shape[0] += n;
  options.dtype = t;
  const double tolerance = t == DType::f64 ? 1e-12 : 2e-5;
  std::vector<Tensor> x, dy;
  std::vector<Step> want;
  Norm whole = prepared<Norm>(shape[1], options);
  for (uint64_t step = 0; step < 2; ++step) {
    x.push_back(random_tensor(shape, step, t, 3));
    dy.push_back(random_tensor(shape, 10 + step, t));
    whole.zero_grad();
    want.push_back(train(whole, x.back(), dy.back()));
    want.back().mean = want.back().mean.clone();
    want.back().var = want.back().var.clone();
  }
  run_local(
      ranks,
      [&](Group group) {
        Norm norm = prepared<Norm>(shape[1], options);
        CHECK(convert_sync_batchnorm(norm, group) == 1);
        int64_t first = 0;
        for (int r = 0; r < group.rank(); ++r) first += rows[static_cast<size_t>(r)];
        const int64_t mine = rows[static_cast<size_t>(group.rank())];
        for (size_t step = 0; step < 2; ++step) {
          norm.zero_grad();
          const auto part = [&](const Tensor& all) { return all.narrow(0, first, mine); };
          const Step got =
              train(norm, laid_out(part(x[step]), order), laid_out(part(dy[step]), order));
          CHECK(difference(got.y, part(want[step].y)) < tolerance);
          CHECK(difference(got.dx, part(want[step].dx)) < tolerance);
          CHECK(difference(got.mean, want[step].mean) < tolerance);
          CHECK(difference(got.var, want[step].var) < tolerance);
          if (!options.affine) continue;
          // The gradients are this rank's part: together they are the whole batch's.
          const double scale = static_cast<double>(x[step].numel() / shape[1]);
          const Tensor dweight = got.dweight.clone(), dbias = got.dbias.clone();
          if (mine == 0) {
            CHECK(difference(dweight, zeros_like(dweight)) == 0);
            CHECK(difference(dbias, zeros_like(dbias)) == 0);
          }
          group.all_reduce(dweight);
          group.all_reduce(dbias);
          CHECK(difference(dweight, want[step].dweight) < tolerance * scale);
          CHECK(difference(dbias, want[step].dbias) < tolerance * scale);
        }
      },
      kSoon);
}

}  // namespace

TEST_CASE("worked by hand: one channel, [1] and [2, 3, 6]") {
  run_local(
      2,
      [](Group group) {
        const bool first = group.rank() == 0;
        nn::BatchNorm1d norm(1, {.eps = 1e-12, .dtype = DType::f64});
        convert_sync_batchnorm(norm, group);
        const Tensor x = first ? tensor(std::vector<double>{1}, {1, 1}).requires_grad_()
                               : tensor(std::vector<double>{2, 3, 6}, {3, 1}).requires_grad_();
        const Tensor y = norm(x);
        // Mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5; unbiased 14 / 3.
        const double rstd = 1 / std::sqrt(3.5);
        const auto got = y.to_vector<double>();
        const std::vector<double> want =
            first ? std::vector<double>{-2 * rstd} : std::vector<double>{-rstd, 0, 3 * rstd};
        for (size_t i = 0; i < want.size(); ++i) CHECK(std::abs(got[i] - want[i]) < 1e-9);
        CHECK(std::abs(norm.running_mean.item<double>() - 0.3) < 1e-12);
        CHECK(std::abs(norm.running_var.item<double>() - (0.9 + 1.4 / 3)) < 1e-12);
        y.backward(first ? ones({1, 1}, {.dtype = DType::f64})
                         : zeros({3, 1}, {.dtype = DType::f64}));
        const auto dx = x.grad().to_vector<double>();
        const std::vector<double> expected =
            first ? std::vector<double>{0.248171}
                  : std::vector<double>{-0.209991, -0.133631, 0.095450};
        for (size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(dx[i] - expected[i]) < 1e-6);
        CHECK(norm.bias.grad().item<double>() == (first ? 1 : 0));
        CHECK(std::abs(norm.weight.grad().item<double>() - (first ? -1.069045 : 0)) < 1e-6);
      },
      kSoon);
}

TEST_CASE("parts of a batch equal the batch on one process") {
  const std::vector<std::vector<int64_t>> batches{{4},       {3, 3},    {1, 4},       {0, 5},
                                                  {2, 2, 2}, {4, 0, 1}, {1, 1, 0, 0}, {5, 1, 2, 3}};
  for (const auto& rows : batches)
    for (DType t : {DType::f32, DType::f64})
      for (Order order : {Order::dense, Order::channels_last, Order::permuted}) {
        against_one_process<nn::BatchNorm1d>(rows, {0, 7}, t, order);
        against_one_process<nn::BatchNorm1d>(rows, {0, 3, 5}, t, order);
        against_one_process<nn::BatchNorm2d>(rows, {0, 5, 3, 4}, t, order);
      }
  against_one_process<nn::BatchNorm2d>({2, 1}, {0, 3, 2, 2}, DType::f64, Order::dense,
                                       {.eps = 0.1, .momentum = std::nullopt});
  against_one_process<nn::BatchNorm2d>({2, 1}, {0, 3, 2, 2}, DType::f64, Order::dense,
                                       {.affine = false});
  // Large enough for several threads and tasks.
  against_one_process<nn::BatchNorm2d>({9, 4}, {0, 16, 40, 40}, DType::f64, Order::dense);
}

TEST_CASE("a mean far from zero costs no accuracy") {
  run_local(
      2,
      [](Group group) {
        nn::BatchNorm1d norm(1, {.momentum = 1, .dtype = DType::f64});
        convert_sync_batchnorm(norm, group);
        // Values 1e9 + {0, 1} and 1e9 + {2, 3}: variance 1.25, unbiased 5/3.
        const double r = group.rank();
        norm(tensor(std::vector<double>{1e9 + 2 * r, 1e9 + 2 * r + 1}, {2, 1}));
        CHECK(std::abs(norm.running_var.item<double>() - 5.0 / 3) < 1e-9);
        CHECK(norm.running_mean.item<double>() == 1e9 + 1.5);
      },
      kSoon);
}

TEST_CASE("every rank makes the same collectives, and none in evaluation") {
  run_local(
      3,
      [](Group group) {
        const auto counting = std::make_shared<Counting>(group.shared());
        Twice net;
        CHECK(convert_sync_batchnorm(net, Group(counting)) == 2);
        *counting->count = 0;
        const Tensor x = random_tensor({group.rank(), 4}, 1, DType::f32);  // rank 0: empty
        sum(net(x).square()).backward();
        CHECK(*counting->count == 4);  // one each, forward and backward
        net.eval();
        sum(net(x).square()).backward();
        if (group.rank() == 1) net(x);  // alone
        CHECK(*counting->count == 4);
        // Without running statistics evaluation takes the batch's, the rank's own.
        nn::BatchNorm1d untracked(4, {.track_running_stats = false});
        convert_sync_batchnorm(untracked, Group(counting));
        untracked.eval();
        *counting->count = 0;
        if (group.rank() == 2) CHECK(std::abs(untracked(x).mean().item<double>()) < 1e-6);
        CHECK(*counting->count == 0);
        CHECK(counting->own == 0);  // all on communicators apart from the user's
      },
      kSoon);
}

TEST_CASE("fewer than two values together are an error on every rank; the group stays usable") {
  run_local(
      3,
      [](Group group) {
        nn::BatchNorm1d norm(2);
        convert_sync_batchnorm(norm, group);
        const Tensor none = zeros({0, 2}), one = ones({1, 2});
        CHECK_THROWS_WITH_AS(norm(group.rank() == 1 ? one : none),
                             doctest::Contains("together have 1"), ShapeError);
        CHECK_THROWS_WITH_AS(norm(none), doctest::Contains("together have 0"), ShapeError);
        CHECK(norm(group.rank() == 1 ? none : one).size(0) == (group.rank() == 1 ? 0 : 1));
        // One that is not synchronised wants two of its own.
        nn::BatchNorm1d alone(2);
        CHECK_THROWS_AS(alone(one), ShapeError);
      },
      kSoon);
}

TEST_CASE("an empty batch on a module that shares nothing is no error and changes nothing") {
  for (const Shape& shape : {Shape{0, 2}, Shape{0, 2, 3, 3}, Shape{2, 2, 0}}) {
    const Tensor mean = zeros({2}), var = ones({2});
    const Tensor weight = full({2}, 3).requires_grad_(), x = zeros(shape).requires_grad_();
    const Tensor y = batch_norm(x, mean, var, weight, {}, true);
    CHECK(y.shape() == shape);
    sum(y).backward();
    CHECK(x.grad().shape() == shape);
    CHECK(weight.grad().to_vector<double>() == std::vector<double>{0, 0});
    CHECK(mean.to_vector<double>() == std::vector<double>{0, 0});
    CHECK(var.to_vector<double>() == std::vector<double>{1, 1});
  }
}

TEST_CASE("second derivatives equal those of one process") {
  const std::vector<int64_t> rows{2, 0, 3};
  const Shape shape{5, 2, 3};
  const Tensor x_all = random_tensor(shape, 1, DType::f64),
               a_all = random_tensor(shape, 2, DType::f64),
               b_all = random_tensor(shape, 3, DType::f64);
  // The gradient by x and weight of sum(b dx^2), where dx is the gradient of sum(a y^2) by x.
  const auto second = [](nn::BatchNorm1d& norm, const Tensor& x, const Tensor& a, const Tensor& b) {
    const Tensor loss = sum(a * norm(x).square());
    const Tensor dx = autograd::grad({loss}, {x}, {}, {.create_graph = true})[0];
    sum(b * dx.square()).backward();
    return dx;
  };
  auto whole = prepared<nn::BatchNorm1d>(2, {.dtype = DType::f64});
  const Tensor x_leaf = x_all.detach().requires_grad_();
  const Tensor dx_whole = second(whole, x_leaf, a_all, b_all);
  run_local(
      3,
      [&](Group group) {
        auto norm = prepared<nn::BatchNorm1d>(2, {.dtype = DType::f64});
        convert_sync_batchnorm(norm, group);
        const int64_t first = group.rank() == 0 ? 0 : 2,
                      mine = rows[static_cast<size_t>(group.rank())];
        const auto part = [&](const Tensor& t) { return t.narrow(0, first, mine); };
        const Tensor x = part(x_all).clone().requires_grad_();
        const Tensor dx = second(norm, x, part(a_all), part(b_all));
        CHECK(difference(dx.detach(), part(dx_whole.detach())) < 1e-12);
        CHECK(difference(x.grad(), part(x_leaf.grad())) < 1e-11);
        const Tensor dweight = norm.weight.grad().clone();
        group.all_reduce(dweight);
        CHECK(difference(dweight, whole.weight.grad()) < 1e-11);
      },
      kSoon);
}

TEST_CASE("under DistributedDataParallel W ranks equal one process") {
  const Tensor x = random_tensor({12, 6}, 1, DType::f64);
  manual_seed(4);
  Classifier start = Classifier{}.to(DType::f64);
  Classifier one = start.clone();
  sum(one(x).square()).backward();
  run_local(
      3,
      [&](Group group) {
        Classifier net = start.clone();
        convert_sync_batchnorm(net, group);
        DistributedDataParallel ddp{std::move(net), group};
        for (int i = 0; i < 2; ++i) {
          ddp.zero_grad();
          sum(ddp(x.narrow(0, 4 * group.rank(), 4)).square()).backward();
          const auto got = ddp.module().parameters(), want = one.parameters();
          for (size_t k = 0; k < got.size(); ++k)  // a mean over ranks of sums
            CHECK(difference(got[k].grad() * 3.0, want[k].grad()) < 1e-11);
        }
      },
      kSoon);
}

TEST_CASE(
    "conversion changes neither state nor modes; clones stay synchronised; printing shows it") {
  run_local(
      2,
      [](Group group) {
        Nested net;
        const auto names = [](const nn::Module& m) {
          std::vector<std::string> all;
          for (const auto& [name, t] : m.state_dict()) all.push_back(name);
          return all;
        };
        const auto before = names(net);
        CHECK(net.to_string().find("sync") == std::string::npos);
        CHECK(convert_sync_batchnorm(net, group) == 2);
        CHECK(names(net) == before);
        CHECK(net.a.to_string() ==
              "BatchNorm2d(4, eps=0.5, momentum=0.1, affine=True, track_running_stats=True, "
              "sync=True)");
        net.eval();
        CHECK_FALSE(net.a.is_training());
        net.train();
        Nested copy = net.clone();
        CHECK(copy.a.reduction == net.a.reduction);
        CHECK(copy.list[0].to_string().find("sync=True") != std::string::npos);
        // Rank 0 has no sample; the clone works with the other's.
        copy.list[0](random_tensor({group.rank() * 3, 3}, 5, DType::f32));
        CHECK(copy.list[0].num_batches_tracked.item<int>() == 1);
        CHECK(net.list[0].num_batches_tracked.item<int>() == 0);
        copy.load_state_dict(net.state_dict());
        CHECK(copy.list[0].num_batches_tracked.item<int>() == 0);
        nn::Linear none(2, 2);
        CHECK(convert_sync_batchnorm(none, group) == 0);
      },
      kSoon);
}

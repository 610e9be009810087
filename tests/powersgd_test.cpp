// PowerSGD: PyTorch's numbers over ten steps, the algorithm in plain loops of doubles, what its
// state is worth, and what becomes of zeros, infinities and rebuilt buckets.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include <lockstep/distributed/ddp/orthogonalize.h>
#include <lockstep/distributed/local.h>
#include <lockstep/distributed/powersgd.h>
#include <lockstep/tensor/ops.h>

#include "golden.h"
#include "wrapped_group.h"

using namespace lockstep;
using namespace lockstep::dist;

namespace {

constexpr LocalOptions kSoon{.timeout = std::chrono::seconds(60)};

/// A model's parameters in buckets, and what DDP does with a hook: all buckets launched, then waited
/// for in order.
struct Model {
  std::vector<std::vector<Shape>> buckets;
  DType dtype = DType::f32;
  std::vector<Tensor> parameters = {};  // over all buckets

  Model(std::vector<std::vector<Shape>> shapes, DType t) : buckets(std::move(shapes)), dtype(t) {
    for (const auto& bucket : buckets)
      for (const Shape& s : bucket) parameters.push_back(zeros(s, {.dtype = t}));
  }
  int64_t elements() const {
    int64_t n = 0;
    for (const Tensor& p : parameters) n += p.numel();
    return n;
  }
  /// The gradients [elements] after the hook. Each bucket's buffer has a gap of one zero after every
  /// parameter.
  Tensor step(const CommHook& hook, ProcessGroup& group, const Tensor& gradients) const {
    std::vector<GradBucket> made;
    size_t parameter = 0;
    int64_t at = 0;
    for (size_t b = 0; b < buckets.size(); ++b) {
      GradBucket bucket;
      bucket.index = static_cast<int>(b);
      bucket.is_last = b + 1 == buckets.size();
      bucket.group = &group;
      int64_t size = 0, offset = 0;
      for (const Shape& s : buckets[b]) size += s.numel() + 1;
      bucket.buffer = zeros({size}, {.dtype = dtype});
      for (const Shape& s : buckets[b]) {
        const int64_t n = s.numel();
        bucket.gradients.push_back(bucket.buffer.narrow(0, offset, n).view(s));
        bucket.gradients.back().copy_(gradients.narrow(0, at, n).view(s));
        bucket.parameters.push_back(parameters[parameter++]);
        offset += n + 1;
        at += n;
      }
      made.push_back(std::move(bucket));
    }
    std::vector<WorkPtr> works;
    for (GradBucket& b : made) works.push_back(hook(b));
    Tensor result = empty({elements()}, {.dtype = dtype});
    at = 0;
    for (size_t b = 0; b < made.size(); ++b) {
      works[b]->wait();
      CHECK(works[b]->is_completed());
      int64_t offset = 0;
      for (const Tensor& g : made[b].gradients) {
        result.narrow(0, at, g.numel()).copy_(g.reshape({-1}));
        offset += g.numel();
        CHECK(made[b].buffer[offset++].item<double>() == 0);  // the gap
        at += g.numel();
      }
    }
    return result;
  }
};

double largest(const Tensor& t) {
  double most = 0;
  for (double v : t.to_vector<double>()) most = std::max(most, std::abs(v));
  return most;
}

// ---- the algorithm once more: one process, doubles, loops ----

using Matrix = std::vector<std::vector<double>>;

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix y(a.size(), std::vector<double>(b[0].size()));
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t k = 0; k < b.size(); ++k)
      for (size_t j = 0; j < b[0].size(); ++j) y[i][j] += a[i][k] * b[k][j];
  return y;
}
Matrix transposed(const Matrix& a) {
  Matrix y(a[0].size(), std::vector<double>(a.size()));
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < a[0].size(); ++j) y[j][i] = a[i][j];
  return y;
}
void add(Matrix& a, const Matrix& b, double factor = 1) {
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < a[0].size(); ++j) a[i][j] += factor * b[i][j];
}
/// Classical Gram-Schmidt: all projections are taken from the column as it was.
void make_orthogonal(Matrix& a) {
  for (size_t c = 0; c < a[0].size(); ++c) {
    std::vector<double> column;
    for (const auto& row : a) column.push_back(row[c]);
    for (size_t before = 0; before < c; ++before) {
      double overlap = 0;
      for (const auto& row : a) overlap += row[before] * row[c];
      for (size_t i = 0; i < a.size(); ++i) column[i] -= overlap * a[i][before];
    }
    double norm = 0;
    for (double v : column) norm += v * v;
    for (size_t i = 0; i < a.size(); ++i) a[i][c] = column[i] / std::sqrt(norm);
  }
}
Matrix matrix_of(const Tensor& t) {
  const auto v = t.to_vector<double>();
  const auto n = static_cast<size_t>(t.size(0)), m = v.size() / n;
  Matrix y(n, std::vector<double>(m));
  for (size_t i = 0; i < v.size(); ++i) y[i / m][i % m] = v[i];
  return y;
}

/// One compressed parameter on all ranks: step() takes the ranks' gradients and returns what each
/// of them ends up with.
struct Reference {
  Matrix q;
  std::vector<Matrix> errors;  // by rank; empty without feedback

  Matrix step(std::vector<Matrix> gradients) {
    const double ranks = static_cast<double>(gradients.size());
    make_orthogonal(q);
    Matrix p(gradients[0].size(), std::vector<double>(q[0].size()));
    for (size_t r = 0; r < gradients.size(); ++r) {
      if (!errors.empty()) add(gradients[r], errors[r]);
      add(p, product(gradients[r], q));
    }
    make_orthogonal(p);
    for (auto& row : q) std::fill(row.begin(), row.end(), 0.0);
    for (const Matrix& g : gradients) add(q, product(transposed(g), p), 1 / ranks);
    const Matrix result = product(p, transposed(q));
    for (size_t r = 0; r < errors.size(); ++r) {
      errors[r] = gradients[r];
      add(errors[r], result, -1);
    }
    return result;
  }
};

Tensor random_tensor(const Shape& shape, uint64_t seed, DType t = DType::f64) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<size_t>(shape.numel()));
  for (double& v : values) v = normal(random);
  return tensor(values, shape).to(t);
}

NamedTensors start_at(int64_t iteration, NamedTensors rest) {
  rest.emplace_back("iteration", tensor(std::vector<int64_t>{iteration}, Shape{}));
  return rest;
}

}  // namespace

TEST_CASE("ten steps equal PyTorch's") {
  const Golden golden("powersgd.safetensors");
  const Model shapes({{{8, 6}, {8}, {3, 2}}, {{4, 4, 2, 2}, {2}, {5, 7}}}, DType::f32);
  const std::map<std::string, PowerSGDOptions> cases{
      {"rank1",
       {.matrix_approximation_rank = 1, .start_powerSGD_iter = 2, .min_compression_rate = 1}},
      {"rank2",
       {.matrix_approximation_rank = 2,
        .start_powerSGD_iter = 2,
        .min_compression_rate = 1,
        .orthogonalization_epsilon = 1e-2}},
      {"rank3",
       {.matrix_approximation_rank = 3, .start_powerSGD_iter = 2, .min_compression_rate = 1}},
      {"no_feedback",
       {.matrix_approximation_rank = 2,
        .start_powerSGD_iter = 2,
        .min_compression_rate = 1,
        .use_error_feedback = false}}};
  for (const auto& entry : cases)
    for (DType dtype : {DType::f32, DType::f64}) {
      const std::string& name = entry.first;
      const PowerSGDOptions& options = entry.second;
      CAPTURE(name);
      CAPTURE(name_of(dtype));
      const double tolerance = dtype == DType::f32 ? 1e-5 : 1e-12;
      run_local(
          2,
          [&](Group group) {
            const Model model(shapes.buckets, dtype);
            PowerSGD hook(options);
            NamedTensors state;
            for (const auto& [k, q] : golden.under(name + ".q."))
              state.emplace_back("q." + k, q.to(dtype));
            CHECK(state.size() >= 2);
            hook.load_state_dict(start_at(0, state));
            const Tensor want = golden[str_cat(name, ".", dtype, ".averages")];
            for (int64_t step = 0; step < 10; ++step) {
              const Tensor got = model.step(hook, group.process_group(),
                                            golden["gradients"][step][group.rank()].to(dtype));
              CHECK(difference(got, want[step]) <= tolerance * largest(want[step]));
            }
            CHECK(hook.iteration() == 10);
            size_t errors = 0;
            for (const auto& [k, t] : hook.state_dict()) {
              if (!k.starts_with("error.")) continue;
              ++errors;
              if (dtype == DType::f32) continue;
              const Tensor error = golden[str_cat(name, ".error", group.rank(), ".", k.substr(6))];
              CHECK(difference(t, error) <= tolerance * largest(error));
            }
            CHECK(errors == (options.use_error_feedback ? state.size() : 0));
          },
          kSoon);
    }
}

TEST_CASE("f64 equals the algorithm in plain loops, for other numbers of ranks") {
  for (int ranks : {1, 3, 4}) {
    CAPTURE(ranks);
    const Shape shape{9, 4, 3};
    constexpr int64_t kRank = 3;
    const Tensor q = random_tensor({12, kRank}, 1);
    const auto gradient = [&](int64_t step, int rank) {
      return random_tensor(shape, static_cast<uint64_t>(100 + step * 8 + rank));
    };
    Reference reference{matrix_of(q), std::vector<Matrix>(static_cast<size_t>(ranks),
                                                          Matrix(9, std::vector<double>(12)))};
    std::vector<Matrix> want;
    for (int64_t step = 0; step < 6; ++step) {
      std::vector<Matrix> all;
      for (int r = 0; r < ranks; ++r) all.push_back(matrix_of(gradient(step, r)));
      want.push_back(reference.step(all));
    }
    run_local(
        ranks,
        [&](Group group) {
          const Model model({{shape}}, DType::f64);
          PowerSGD hook({.matrix_approximation_rank = kRank,
                         .start_powerSGD_iter = 0,
                         .min_compression_rate = 1});
          hook.load_state_dict(start_at(0, {{"q.0", q}}));
          for (int64_t step = 0; step < 6; ++step) {
            const auto got =
                model.step(hook, group.process_group(), gradient(step, group.rank()).reshape({-1}))
                    .to_vector<double>();
            double off = 0;
            for (size_t i = 0; i < got.size(); ++i)
              off =
                  std::max(off, std::abs(got[i] - want[static_cast<size_t>(step)][i / 12][i % 12]));
            CHECK(off < 1e-11);
          }
        },
        kSoon);
  }
}

TEST_CASE("what is sent: plain gradients with P, then Q; before the start all of it") {
  struct Seen : WrappedGroup {
    using WrappedGroup::WrappedGroup;
    WorkPtr start(Collective call) override {
      sent.push_back(call.text());
      return inner_->start(std::move(call));
    }
    std::vector<std::string> sent;
  };
  run_local(
      2,
      [&](Group group) {
        Seen seen(group.shared());
        const Model model({{{20, 10}, {20}, {2, 2}}, {{5}}}, DType::f32);
        PowerSGD hook({.matrix_approximation_rank = 2, .start_powerSGD_iter = 1});
        const Tensor g =
            random_tensor({model.elements()}, 3 + static_cast<uint64_t>(group.rank()), DType::f32);
        model.step(hook, seen, g);
        // Gaps included: 200 + 1 + 20 + 1 + 4 + 1.
        CHECK(seen.sent == std::vector<std::string>{"all_reduce(avg) of f32 [227]",
                                                    "all_reduce(avg) of f32 [6]"});
        seen.sent.clear();
        model.step(hook, seen, g);
        // 20 + 4 plain and P [20, 2]; 5 plain; Q [10, 2] when the first is waited for.
        CHECK(seen.sent == std::vector<std::string>{"all_reduce(sum) of f32 [64]",
                                                    "all_reduce(sum) of f32 [5]",
                                                    "all_reduce(avg) of f32 [20]"});
        CHECK(hook.compression_stats().numel_before == 229);
        CHECK(hook.compression_stats().numel_after == 20 + 4 + 5 + 40 + 20);
      },
      kSoon);
}

TEST_CASE("error feedback: over many steps nothing is lost") {
  // A constant gradient of full rank: the sum of what was applied nears the sum of gradients.
  const auto lost = [](bool feedback) {
    double share = 0;
    run_local(
        2,
        [&](Group group) {
          const Model model({{{6, 6}}}, DType::f64);
          PowerSGD hook({.matrix_approximation_rank = 1,
                         .start_powerSGD_iter = 0,
                         .min_compression_rate = 1,
                         .use_error_feedback = feedback});
          const Tensor mine = random_tensor({36}, 50 + static_cast<uint64_t>(group.rank()));
          Tensor applied = zeros({36}, {.dtype = DType::f64});
          for (int i = 0; i < 200; ++i) applied.add_(model.step(hook, group.process_group(), mine));
          Tensor average = mine.clone();
          group.all_reduce(average, ReduceOp::avg);
          if (group.rank() == 0) share = largest(applied / 200.0 - average) / largest(average);
        },
        kSoon);
    return share;
  };
  CHECK(lost(true) < 0.1);
  CHECK(lost(false) > 0.3);
}

TEST_CASE("state: saved and loaded it goes on to the same bits, also before the first step") {
  const auto folder_free = [](const NamedTensors& s) {  // as a checkpoint would give it back
    NamedTensors copy;
    for (const auto& [name, t] : s) copy.emplace_back(name, t.clone());
    return copy;
  };
  run_local(
      2,
      [&](Group group) {
        const std::vector<std::vector<Shape>> shapes{{{8, 6}, {8}}, {{4, 9}}};
        const PowerSGDOptions options{
            .matrix_approximation_rank = 2, .start_powerSGD_iter = 1, .min_compression_rate = 1};
        const auto gradient = [&](uint64_t step) {
          return random_tensor({92}, step * 2 + static_cast<uint64_t>(group.rank()), DType::f32);
        };
        const Model model(shapes, DType::f32), other(shapes, DType::f32);
        PowerSGD through(options), second(options);
        for (uint64_t i = 0; i < 4; ++i) model.step(through, group.process_group(), gradient(i));
        const NamedTensors saved = folder_free(through.state_dict());
        CHECK(saved.size() == 5);
        second.load_state_dict(saved);
        for (uint64_t i = 4; i < 7; ++i) {
          const Tensor a = model.step(through, group.process_group(), gradient(i)),
                       b = other.step(second, group.process_group(), gradient(i));
          CHECK(difference(a, b) == 0);
        }
        // Back to an earlier state in the same object.
        const Tensor once = model.step(through, group.process_group(), gradient(9));
        second.load_state_dict(saved);
        CHECK(second.iteration() == 4);
        CHECK(difference(other.step(second, group.process_group(), gradient(9)), once) != 0);
      },
      kSoon);
}

TEST_CASE("state that makes no sense is refused") {
  PowerSGD hook({.start_powerSGD_iter = 0, .min_compression_rate = 1});
  const Tensor q = random_tensor({6, 1}, 1, DType::f32);
  CHECK_THROWS_AS(hook.load_state_dict({}), ValueError);
  CHECK_THROWS_AS(hook.load_state_dict(start_at(-1, {})), ValueError);
  for (const char* name : {"q", "q.", "q.x", "q.-1", "q.1x", "p.0", ".0", "q.99999999999999999999",
                           "q.4294967296", "error.1.2"})
    CHECK_THROWS_AS(hook.load_state_dict(start_at(0, {{name, q}})), ValueError);
  CHECK_THROWS_AS(hook.load_state_dict(start_at(0, {{"q.0", q.reshape({-1})}})), ValueError);
  CHECK_THROWS_AS(hook.load_state_dict(start_at(0, {{"q.0", q.to(DType::i64)}})), ValueError);
  CHECK_THROWS_AS(PowerSGD({.matrix_approximation_rank = 0}), ValueError);
  CHECK_THROWS_AS(PowerSGD({.start_powerSGD_iter = -1}), ValueError);
  CHECK_THROWS_AS(PowerSGD({.min_compression_rate = -1}), ValueError);
  CHECK_THROWS_AS(PowerSGD({.orthogonalization_epsilon = -1}), ValueError);

  const Group one;
  const Model model({{{8, 5}}}, DType::f32);
  hook.load_state_dict(start_at(0, {{"q.0", q}}));
  CHECK_THROWS_WITH_AS(model.step(hook, one.process_group(), zeros({40})), doctest::Contains("q.0"),
                       ShapeError);
  hook.load_state_dict(start_at(0, {{"error.0", zeros({8, 5}, {.dtype = DType::f64})}}));
  CHECK_THROWS_WITH_AS(model.step(hook, one.process_group(), zeros({40})),
                       doctest::Contains("error.0"), DTypeError);
}

TEST_CASE("gradients in another memory order are the same matrices") {
  run_local(
      2,
      [&](Group group) {
        const PowerSGDOptions options{
            .matrix_approximation_rank = 2, .start_powerSGD_iter = 0, .min_compression_rate = 1};
        PowerSGD dense(options), strided(options);
        const Model model({{{6, 2, 3, 2}, {3, 2}}}, DType::f64);
        for (uint64_t step = 0; step < 3; ++step) {
          const Tensor values = random_tensor({78}, 2 * step + static_cast<uint64_t>(group.rank()));
          const Tensor want = model.step(dense, group.process_group(), values);
          GradBucket bucket;
          bucket.is_last = true;
          bucket.group = &group.process_group();
          bucket.parameters = model.parameters;
          bucket.buffer = zeros({78}, {.dtype = DType::f64});
          // Channels-last, and a transpose.
          bucket.gradients = {
              bucket.buffer.narrow(0, 0, 72).view({6, 3, 2, 2}).permute({0, 3, 1, 2}),
              bucket.buffer.narrow(0, 72, 6).view({2, 3}).t()};
          bucket.gradients[0].copy_(values.narrow(0, 0, 72).view({6, 2, 3, 2}));
          bucket.gradients[1].copy_(values.narrow(0, 72, 6).view({3, 2}));
          strided(bucket)->wait();
          CHECK(difference(bucket.gradients[0].reshape({72}), want.narrow(0, 0, 72)) < 1e-13);
          CHECK(difference(bucket.gradients[1].reshape({6}), want.narrow(0, 72, 6)) < 1e-13);
        }
      },
      kSoon);
}

TEST_CASE("memory follows the parameter into other buckets") {
  run_local(
      2,
      [&](Group group) {
        const PowerSGDOptions options{
            .matrix_approximation_rank = 1, .start_powerSGD_iter = 0, .min_compression_rate = 1};
        const Model before({{{8, 6}}, {{5, 7}}}, DType::f64);
        Model after({{{5, 7}, {8, 6}}}, DType::f64);  // one bucket, the other way round
        after.parameters = {before.parameters[1], before.parameters[0]};
        PowerSGD rebuilt(options), kept(options);
        const auto a = random_tensor({48}, 1 + static_cast<uint64_t>(group.rank())),
                   b = random_tensor({35}, 7 + static_cast<uint64_t>(group.rank()));
        ProcessGroup& g = group.process_group();
        before.step(rebuilt, g, cat({a, b}));
        before.step(kept, g, cat({a, b}));
        const Tensor x = after.step(rebuilt, g, cat({b, a})), y = before.step(kept, g, cat({a, b}));
        CHECK(difference(x.narrow(0, 35, 48), y.narrow(0, 0, 48)) < 1e-14);
        CHECK(difference(x.narrow(0, 0, 35), y.narrow(0, 48, 35)) < 1e-14);
      },
      kSoon);
}

TEST_CASE("zeros stay zeros and are forgotten; what is not finite passes once") {
  run_local(
      2,
      [&](Group group) {
        const Model model({{{6, 5}}}, DType::f32);
        PowerSGD hook(
            {.matrix_approximation_rank = 2, .start_powerSGD_iter = 0, .min_compression_rate = 1});
        ProcessGroup& g = group.process_group();
        for (int i = 0; i < 2; ++i) CHECK(largest(model.step(hook, g, zeros({30}))) == 0);
        // Rank 1: one step, error feedback included, gets it exactly.
        const Tensor u = random_tensor({6, 1}, 4, DType::f32),
                     v = random_tensor({1, 5}, 5, DType::f32);
        const Tensor low = matmul(u, v).reshape({-1});
        CHECK(difference(model.step(hook, g, low), low) < 1e-5);
        Tensor broken = low.clone();
        if (group.rank() == 1) broken[7].fill_(std::numeric_limits<double>::infinity());
        bool finite = true;
        for (double x : model.step(hook, g, broken).to_vector<double>()) finite &= std::isfinite(x);
        CHECK_FALSE(finite);
        CHECK(difference(model.step(hook, g, low), low) < 1e-5);
      },
      kSoon);
}

TEST_CASE("orthogonalize: orthonormal columns of the same span, zeros stay") {
  const Tensor a = random_tensor({7, 3}, 2), q = a.clone();
  orthogonalize(q, 0);
  CHECK(difference(matmul(q.t(), q),
                   tensor(std::vector<double>{1, 0, 0, 0, 1, 0, 0, 0, 1}, {3, 3})) < 1e-14);
  CHECK(difference(matmul(q, matmul(q.t(), a)), a) < 1e-13);
  // [3, 4] has norm 5; with epsilon 5 the column is halved.
  const Tensor b = tensor(std::vector<float>{3, 4}, {2, 1});
  orthogonalize(b, 5);
  CHECK(difference(b, tensor(std::vector<float>{0.3f, 0.4f}, {2, 1})) < 1e-7);
  const Tensor c =
      tensor(std::vector<double>{2, 0, 0, 0, 0, 5}, {2, 3});  // columns [2,0] [0,0] [0,5]
  orthogonalize(c, 0);
  CHECK(c.to_vector<double>() == std::vector<double>{1, 0, 0, 0, 0, 1});
  draw_zero_columns(c, {.seed = 1, .offset = 2});
  CHECK(c.to_vector<double>()[0] == 1);
  CHECK(c.to_vector<double>()[1] != 0);
  CHECK(c.to_vector<double>()[4] != 0);
  CHECK(c.to_vector<double>()[5] == 1);
  const Tensor many = zeros({20000, 1}, {.dtype = DType::f64}), again = many.clone(),
               others = many.clone();
  draw_zero_columns(many, {.seed = 1, .offset = 2});
  draw_zero_columns(again, {.seed = 1, .offset = 2});
  draw_zero_columns(others, {.seed = 1, .offset = 3});
  CHECK(difference(many, again) == 0);
  CHECK(difference(many, others) > 1);
  CHECK(std::abs(many.mean().item<double>()) < 0.03);
  CHECK(std::abs(many.square().mean().item<double>() - 1) < 0.05);
}

// dist::Accumulation: ragged micro-batches on several ranks against one process and one big batch.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

/// `sizes[rank][i]`: samples of micro-batch i. Sample k of all is x = 1 + k / 7, its target is ignored when k
/// is a multiple of 3, its loss w x^2.
struct Plan {
  std::vector<std::vector<int>> sizes;
  int64_t steps;
};

/// The sum and the number of the losses of samples [first, first + n).
std::pair<Tensor, int64_t> loss_of(const Tensor& w, int first, int n) {
  Tensor sum = w * 0.0;
  int64_t count = 0;
  for (int k = first; k < first + n; ++k) {
    if (k % 3 == 0) continue;
    const double x = 1 + k / 7.0;
    sum = sum + w * (x * x);
    ++count;
  }
  return {sum, count};
}

struct Square : nn::Module {
  nn::Parameter w{f64(0.5)};
  std::pair<Tensor, int64_t> forward(int first, int n) { return loss_of(w, first, n); }
  LOCKSTEP_MODULE(Square, w)
};

/// Trains over the windows of a plan; returns w and the mean loss of each window.
std::pair<double, std::vector<double>> train(Group g, const Plan& plan) {
  DistributedDataParallel net{Square{}, g};
  optim::SGD opt{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
  dist::Accumulation acc{net, g, {.steps = plan.steps}};
  std::vector<double> losses;
  // Samples are numbered window by window, then rank by rank, so that windows are the same sets
  // however they are split.
  size_t most = 0;
  for (const auto& mine : plan.sizes) most = std::max(most, mine.size());
  int first = 0;
  for (size_t window = 0; window * static_cast<size_t>(plan.steps) < most; ++window) {
    for (size_t r = 0; r < plan.sizes.size(); ++r)
      for (int64_t i = 0; i < plan.steps; ++i) {
        const size_t at = window * static_cast<size_t>(plan.steps) + static_cast<size_t>(i);
        if (at >= plan.sizes[r].size()) continue;
        const int n = plan.sizes[r][at];
        if (static_cast<int>(r) == g.rank()) {
          auto [sum, count] = net(first, n);
          acc.backward(sum, count);
          if (acc.step(opt)) losses.push_back(acc.mean_loss());
        }
        first += n;
      }
  }
  if (acc.step(opt, true)) losses.push_back(acc.mean_loss());
  return {net.module().w.item<double>(), losses};
}

void compare(const Plan& plan, const Plan& whole) {
  const auto want = train(Group(), whole);
  CHECK_NOTHROW(run_local(
      static_cast<int>(plan.sizes.size()),
      [&](Group g) {
        const auto got = train(g, plan);
        near(got.first, want.first, "w");
        require(got.second.size() == want.second.size(), "windows");
        for (size_t i = 0; i < want.second.size(); ++i)
          near(got.second[i], want.second[i], "the loss of a window");
        equal_on_all(g, f64(got.first), "w");
      },
      kQuick));
}

}  // namespace

TEST_CASE("ragged micro-batches on several ranks equal one big batch") {
  compare({{{2, 3, 1, 4}, {1, 5, 2, 2}}, 2}, {{{11, 9}}, 1});
  compare({{{7}, {1}, {3}}, 1}, {{{11}}, 1});
  compare({{{2, 1}, {0, 3}}, 2}, {{{6}}, 1});  // an empty batch
}

TEST_CASE("a short window at the end makes a step of its own size") {
  compare({{{2, 3, 4}, {1, 2, 2}}, 2}, {{{8, 6}}, 1});
  compare({{{2, 3, 1}}, 2}, {{{5, 1}}, 1});
  // One rank has no micro-batch left, one has a whole window and the other half of one.
  compare({{{2, 3, 4}, {1, 2}}, 2}, {{{8, 4}}, 1});
  compare({{{2, 3, 4, 5}, {1, 2, 6}}, 2}, {{{8, 15}}, 1});
}

TEST_CASE("Accumulation does not warn of windows of different lengths, which it weighs exactly") {
  Warnings warnings;
  compare({{{2, 3, 4}, {1, 2}}, 2}, {{{8, 4}}, 1});
  compare({{{2, 3, 4, 5}, {1, 2, 6}}, 2}, {{{8, 15}}, 1});
  CHECK(warnings.all.empty());
}

TEST_CASE("in mid-window a step does nothing, and a full window must be stepped") {
  DistributedDataParallel net{Scalar{}, Group()};
  optim::SGD opt{net.parameters(), {.lr = 1}};
  dist::Accumulation acc{net, Group(), {.steps = 2}};
  CHECK_FALSE(acc.step(opt));
  acc.backward(net(f64(3)), 2);
  CHECK_FALSE(acc.step(opt));
  CHECK(net.module().w.item<double>() == 10);
  acc.backward(net(f64(5)), 2);
  CHECK_THROWS_AS(acc.backward(net(f64(5)), 2), Error);
  CHECK(acc.step(opt));
  CHECK(net.module().w.item<double>() == 10 - 8 / 4.0);
  CHECK(acc.mean_loss() == doctest::Approx(80 / 4.0));
  CHECK_FALSE(acc.step(opt, true));  // nothing begun
}

TEST_CASE("gradients that are cleared within a window are an error of the next call") {
  const auto train = [](Group g, bool close, int clear_after) {
    DistributedDataParallel net{Two{}, g};
    optim::SGD opt{net.parameters(), {.lr = 1}};
    dist::Accumulation acc{net, g, {.steps = 3}};
    opt.zero_grad();  // before a window it is harmless
    for (int i = 1; i <= 2; ++i) {
      auto [ya, yb] = net(f64(1));
      acc.backward(i == 1 ? ya : ya + yb, 1);  // b has no gradient at first
      if (i == clear_after) opt.zero_grad();
    }
    if (close) acc.step(opt, true);
  };
  CHECK_NOTHROW(train(Group(), true, 3));
  CHECK(contains(error_of([&] { train(Group(), false, 1); }),
                 "was cleared after micro-batch 1 of a window of 3"));
  CHECK(contains(error_of([&] { train(Group(), true, 2); }),
                 "was cleared after micro-batch 2 of a window of 3"));
  for (const std::string& text : texts(2, [&](Group g) { train(g, false, 1); }))
    CHECK_MESSAGE(contains(text, "was cleared after micro-batch 1 of a window of 3"), text);
}

TEST_CASE("an Accumulation that ends within a window warns, unless an exception ends it") {
  Warnings warnings;
  const auto train = [](int micro_batches, bool close, bool throws) {
    DistributedDataParallel net{Scalar{}, Group()};
    optim::SGD opt{net.parameters(), {.lr = 1}};
    dist::Accumulation acc{net, Group(), {.steps = 2}};
    for (int i = 0; i < micro_batches; ++i) {
      acc.backward(net(f64(3)), 2);
      acc.step(opt);
    }
    if (close) acc.step(opt, true);
    if (throws) throw ValueError("its own");
  };
  train(4, false, false);
  train(3, true, false);
  CHECK_THROWS_AS(train(3, false, true), ValueError);
  CHECK(warnings.all.empty());
  train(3, false, false);
  REQUIRE(warnings.all.size() == 1);
  CHECK(contains(warnings.all[0], "it ends within a window, after micro-batch 1 of 2"));
}

TEST_CASE("windows of other lengths on one rank are an error at the start") {
  for (const std::string& text : texts(3, [](Group g) {
         DistributedDataParallel net{Scalar{}, g};
         dist::Accumulation acc{net, g, {.steps = g.rank() == 2 ? 3 : 4}};
       }))
    CHECK_MESSAGE(contains(text, "steps 4 on rank 0, 3 on rank 2"), text);
}

TEST_CASE("gradients of a window may be clipped, and are clipped alike") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Two{}, g};
        optim::SGD opt{net.parameters(), {.lr = 1}};
        dist::Accumulation acc{net, g, {.steps = 2}};
        for (int i = 0; i < 2; ++i) {  // rank r gives 3 (r + 1) and 4 (r + 1) twice, over 6 targets
          auto [ya, yb] = net(f64(g.rank() + 1.0));
          acc.backward(3.0 * ya + 4.0 * yb, g.rank() + 1);
        }
        require(acc.finish(), "a full window");
        // The sum over the ranks is 2 (3 + 6) and 2 (4 + 8), over 6 targets: 3 and 4, of norm 5.
        near(optim::clip_grad_norm_(net.parameters(), 1).item<double>(), 5, "the norm");
        near(net.module().a.grad().item<double>(), 3 / (5 + 1e-6), "a, clipped");
        opt.step();
        near(net.module().b.item<double>(), 3 - 4 / (5 + 1e-6), "b");
        equal_on_all(g, net.module().a, "a");
      },
      kQuick));
}

TEST_CASE("an exception of any type in a window's backward ends it on every rank, and the window") {
  const double begin = ranks::now();
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Two{}, g, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6}};
    optim::SGD opt{net.parameters(), {.lr = 1}};
    dist::Accumulation acc{net, g, {.steps = 1}};
    auto [ya, yb] = net(f64(1));
    ya.register_hook([&](const Tensor&) -> Tensor {
      if (g.rank() == 1) throw 1;
      return {};
    });
    try {
      acc.backward(ya + yb, 1);
    } catch (int) {
      require(acc.position() == 0, "the window");
      std::this_thread::sleep_for(std::chrono::seconds(2));  // the peer does not wait for the end
      throw ValueError("its own");
    }
  });
  CHECK_MESSAGE(contains(all[0], "no std::exception"), all[0]);
  CHECK(all[1] == "its own");
  CHECK(ranks::now() - begin < 10 * ranks::kPatience);
}

TEST_CASE("a window without any target is an error") {
  for (const std::string& text : texts(2, [](Group g) {
         DistributedDataParallel net{Scalar{}, g};
         optim::SGD opt{net.parameters(), {.lr = 1}};
         dist::Accumulation acc{net, g, {.steps = 1}};
         acc.backward(net(f64(0)), 0);
         acc.step(opt);
       }))
    CHECK_MESSAGE(contains(text, "no targets"), text);
}

TEST_CASE("the gradient that a frozen parameter kept is no part of the window") {
  auto train = [](Group g) {
    DistributedDataParallel net{Two{}, g};
    Two& m = net.module();
    optim::SGD opt{net.parameters(), {.lr = 1}};
    auto [ya, yb] = net(f64(1));
    (ya + yb).backward();
    m.a.set_grad({});
    m.b.requires_grad_(false);
    dist::Accumulation acc{net, g, {.steps = 2}};
    for (int i = 0; i < 2; ++i) acc.backward(net(f64(1)).first, 4);
    require(acc.step(opt), "a whole window");
    near(m.a.item<double>(), 2 - 2.0 / 8, "a: two losses of slope 1, eight targets");
    near(m.b.item<double>(), 3 - 1, "b: its own gradient, as it was");
  };
  CHECK_NOTHROW(train(Group()));
  CHECK_NOTHROW(run_local(2, train, kQuick));
}

namespace {

/// Micro-batch i of a rank: its loss is x (a + b), over `count` targets.
double x_of(int rank, int i) { return 1 + i + 10.0 * rank; }
int64_t count_of(int rank, int i) { return 1 + (i + rank) % 3; }

/// What backward throws at micro-batch `at`, on these ranks; where `first` in the first node that runs,
/// else when b has its gradient.
struct Bad {
  int at;
  std::vector<int> ranks;
  bool first;
  bool holds(int rank, int i) const {
    return i == at && std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }
};

/// Three windows of `steps` micro-batches of each of `size` ranks, worked by hand: a, b, and the losses. A
/// rank's window that holds the bad one begins anew with the next.
std::vector<double> by_hand(int size, int steps, const Bad& bad) {
  std::vector<int> next(static_cast<size_t>(size));
  std::vector<double> result;
  double a = 2, b = 3;
  for (int window = 0; window < 3; ++window) {
    double slope = 0, count = 0;
    for (int r = 0; r < size; ++r) {
      int& i = next[static_cast<size_t>(r)];
      for (int k = i; k < i + steps; ++k)
        if (bad.holds(r, k)) {
          i = k + 1;
          break;
        }
      for (int k = 0; k < steps; ++k, ++i) {
        slope += x_of(r, i);
        count += static_cast<double>(count_of(r, i));
      }
    }
    result.push_back(slope * (a + b) / count);
    a -= 0.125 * slope / count;
    b -= 0.125 * slope / count;
  }
  result.push_back(a);
  result.push_back(b);
  return result;
}

std::vector<double> skipping(Group g, int steps, const Bad& bad) {
  DistributedDataParallel net{Two{}, g};
  optim::SGD opt{net.parameters(), {.lr = 0.125}};
  dist::Accumulation acc{net, g, {.steps = steps}};
  std::vector<double> result;
  for (int i = 0; result.size() < 3; ++i) {
    auto [ya, yb] = net(f64(x_of(g.rank(), i)));
    const Tensor loss = ya + yb;
    if (bad.holds(g.rank(), i))
      (bad.first ? loss : ya).register_hook([](const Tensor&) -> Tensor { throw 1; });
    try {
      acc.backward(loss, count_of(g.rank(), i));
    } catch (int) {
      require(acc.position() == 0, "the window");
      require(!net.module().b.grad().defined(), "a gradient of the window that failed");
      continue;
    }
    if (acc.step(opt)) result.push_back(acc.mean_loss());
  }
  result.push_back(net.module().a.item<double>());
  result.push_back(net.module().b.item<double>());
  return result;
}

}  // namespace

TEST_CASE("after an exception in any backward before a launch the next window is right") {
  for (const int size : {1, 2, 3})
    for (const int steps : {1, 2, 3})
      for (int at = 0; at < 2 * steps; ++at)
        for (const bool first : {true, false})
          for (const bool everywhere : {true, false}) {
            const Bad bad{at, everywhere ? std::vector{0, 1, 2} : std::vector{size - 1}, first};
            const auto want = by_hand(size, steps, bad);
            const auto check = [&](Group g) {
              const auto got = skipping(g, steps, bad);
              for (size_t i = 0; i < want.size(); ++i) near(got[i], want[i], str_cat("number ", i));
            };
            CAPTURE(size);
            CAPTURE(steps);
            CAPTURE(at);
            CAPTURE(first);
            CAPTURE(everywhere);
            CHECK_NOTHROW(size == 1 ? check(Group()) : run_local(size, check, kQuick));
          }
}

TEST_CASE("a rank whose last window failed closes with nothing") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        optim::SGD opt{net.parameters(), {.lr = 1}};
        dist::Accumulation acc{net, g, {.steps = 2}};
        acc.backward(net(f64(1)), 100);
        const Tensor loss = net(f64(3));
        if (g.rank() == 1) loss.register_hook([](const Tensor&) -> Tensor { throw 1; });
        try {
          acc.backward(loss, 2 - g.rank() * 1000 + 1000);
        } catch (int) {
        }
        require(acc.step(opt, true), "rank 0's window");
        require(acc.count() == 1102, "rank 0's targets");
        near(net.module().w.item<double>(), 10 - 4 / 1102.0, "w");
        require(!acc.step(opt, true), "nothing is left");
      },
      kQuick));
}

TEST_CASE("after an exception behind a launch every later window says what to do") {
  const auto all = texts(2, [](Group g) {
    DistributedDataParallel net{Two{}, g, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6}};
    optim::SGD opt{net.parameters(), {.lr = 1}};
    dist::Accumulation acc{net, g, {.steps = 2}};
    std::string last;
    for (int i = 0; i < 6; ++i) {
      auto [ya, yb] = net(f64(1));  // b's bucket is launched before a's gradient is there
      if (g.rank() == 1 && i == 1)
        ya.register_hook([](const Tensor&) -> Tensor { throw ValueError("a bad batch"); });
      try {
        acc.backward(ya + yb, 1);
        require(!acc.step(opt), "a step of ranks that do not agree");
      } catch (const Error& e) {
        last = e.what();
        require(acc.position() == 0, "the window");
        require(!net.module().b.grad().defined(), "a gradient of the window that failed");
      }
    }
    throw DistError(last);
  });
  for (const std::string& text : all) {
    CHECK_MESSAGE(contains(text, "rank 1 failed inside DDP's backward: a bad batch"), text);
    CHECK_MESSAGE(contains(text, "wrap the module again"), text);
  }
}

TEST_CASE("a window without any target is one error on all ranks, and the next window is right") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        optim::SGD opt{net.parameters(), {.lr = 1}};
        dist::Accumulation acc{net, g, {.steps = 2}};
        std::string text;
        try {  // rank 0's window is full, rank 1 closes its own
          for (int i = 0; i < 2 - g.rank(); ++i) acc.backward(net(f64(5)), 0);
          acc.step(opt, true);
        } catch (const Error& e) {
          text = e.what();
        }
        require(contains(text, "no targets"), text);
        for (int i = 0; i < 2; ++i) acc.backward(net(f64(1)), 2);
        require(acc.step(opt), "a whole window");
        near(net.module().w.item<double>(), 10 - 4 / 8.0, "w");
      },
      kQuick));
}

TEST_CASE("a last micro-batch that needs no gradient of the module is part of its window") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        DistributedDataParallel net{Scalar{}, g};
        optim::SGD opt{net.parameters(), {.lr = 1}};
        dist::Accumulation acc{net, g, {.steps = 2}};
        const Tensor other = f64(1).requires_grad_();
        acc.backward(net(f64(1)), 1);
        acc.backward(g.rank() == 0 ? net(f64(1)) : other * 2.0, 1);
        require(acc.step(opt), "a whole window");
        near(net.module().w.item<double>(), 10 - 3 / 4.0, "w");
        near(acc.mean_loss(), 32 / 4.0, "the loss");
      },
      kQuick));
}

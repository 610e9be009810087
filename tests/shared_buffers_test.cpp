// Buffers that share memory, in every way, under DistributedDataParallel: they follow rank 0 and still share it,
// on every rank. Ranks are threads.
#include <doctest/doctest.h>

#include "ddp_helpers.h"

namespace {

/// w x, and buffers over two pieces of memory: `whole`, a row of it, a column of it, the same tensor once
/// more, and the same elements by another tensor; `alone`, and a view of it that repeats it.
struct Shared : nn::Module {
  nn::Parameter w{f64(10)};
  nn::Buffer row, whole{zeros({2, 3}, {.dtype = DType::f64})}, column, twice, same;
  nn::Buffer alone{zeros({1, 3}, {.dtype = DType::f64})}, repeated;
  nn::Buffer constant{f64({1, 2})};
  Shared() {
    row = whole[1];
    column = whole.select(1, 2);
    twice = whole;
    same = whole.detach();
    repeated = alone.expand({4, 3});
  }
  /// Counts up, as statistics do, by what each rank sees.
  Tensor forward(Tensor x) {
    {
      NoGradGuard guard;
      Tensor(whole).add_(x.item<double>());
      Tensor(alone).add_(2 * x.item<double>());
    }
    return w * x;
  }
  LOCKSTEP_MODULE(Shared, w, row, whole, column, twice, same, alone, repeated, constant)
};

void expect(const Tensor& t, double value, const std::string& name) {
  for (const double x : t.to_vector<double>()) near(x, value, name);
}

/// All values, and that a write through one is seen through the others.
void check(Shared& m, double whole, double alone, const std::string& when) {
  for (const Tensor& t : {m.row, m.whole, m.column, m.twice, m.same}) expect(t, whole, when);
  for (const Tensor& t : {m.alone, m.repeated}) expect(t, alone, when);
  NoGradGuard guard;
  Tensor(m.whole)[1][2].fill_(7);
  near(m.row[2].item<double>(), 7, when + ": the row");
  near(m.column[1].item<double>(), 7, when + ": the column");
  near(m.twice[1][2].item<double>(), 7, when + ": the same tensor");
  near(m.same[1][2].item<double>(), 7, when + ": the same elements");
  Tensor(m.alone)[0][1].fill_(8);
  for (int i = 0; i < 4; ++i) near(m.repeated[i][1].item<double>(), 8, when + ": the repeated");
  Tensor(m.whole).fill_(whole);
  Tensor(m.alone).fill_(alone);
}

}  // namespace

TEST_CASE("buffers that share memory follow rank 0 and go on to share it") {
  for (const int size : {1, 2, 3})
    CHECK_NOTHROW(run_local(
        size,
        [](Group g) {
          Shared m;
          {
            NoGradGuard guard;
            Tensor(m.whole).fill_(g.rank() + 5.0);
            Tensor(m.alone).fill_(g.rank() + 1.0);
          }
          DistributedDataParallel net{m, g};
          check(m, 5, 1, "construction");
          const void* constant = m.constant.data_ptr();
          for (int step = 1; step <= 3; ++step) {
            net.zero_grad();
            net(f64(g.rank() + 1.0)).backward();
            check(m, 5 + step, 1 + 2 * step, str_cat("step ", step));
          }
          {
            NoGradGuard guard;
            Tensor(m.whole).fill_(g.rank() + 20.0);
            Tensor(m.alone).fill_(g.rank() + 30.0);
          }
          net.sync_buffers();
          check(m, 20, 30, "sync_buffers");
          require(m.constant.data_ptr() == constant, "what is rank 0's already moved");
          net.join([&] {
            for (int i = 0; i <= g.rank(); ++i) net(f64(g.rank() + 1.0)).backward();
          });
          // The last rank has inputs longest, and its own value then is that of the lowest before.
          equal_on_all(g, m.whole, "whole");
          const double whole = m.whole[0][0].item<double>(), alone = m.alone[0][0].item<double>();
          check(m, whole, alone, "join");
        },
        kQuick));
}

TEST_CASE("what a graph has saved of a shared buffer stays when rank 0's values come") {
  CHECK_NOTHROW(run_local(
      2,
      [](Group g) {
        Shared m;
        DistributedDataParallel net{m, g};
        const Tensor x = f64(g.rank() + 1.0), v = f64({1, 1, 1}).requires_grad_();
        const Tensor y = net(x);
        const Tensor saved = (v * m.row).sum();  // of this rank's row, 1 or 2
        y.backward();                            // the row is rank 0's now
        near(m.row[0].item<double>(), 1, "rank 0's");
        saved.backward();
        near(v.grad()[0].item<double>(), g.rank() + 1.0, "this rank's");
      },
      kQuick));
}

TEST_CASE("memory that buffers share on one rank alone is a difference of modules") {
  for (const std::string& text : texts(2, [](Group g) {
         Shared m;
         if (g.rank() == 1) m.row = zeros({3}, {.dtype = DType::f64});
         DistributedDataParallel net{m, g};
       })) {
    CHECK_MESSAGE(contains(text, "the module differs between ranks"), text);
    CHECK_MESSAGE(contains(text, "of row"), text);
  }
}

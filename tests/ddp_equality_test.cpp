// W ranks equal one process: as threads over `local` and as processes over `shm`; and planted
// faults do not.
#include <doctest/doctest.h>

#include "equality.h"
#include "ranks.h"
#include "texts.h"
#include "wrapped_group.h"

using namespace lockstep;
using equality::difference, equality::Outcome, equality::Setup, equality::train;

namespace {

/// What each rank checks, in whatever way ranks are run.
void check_rank(const dist::Group& group) {
  const Setup setup{.most_delay_ms = 20, .delay_seed = 1};
  const Outcome one = train(dist::Group(), {}), mine = train(group, setup);
  ranks::require(difference(mine.weights, one.weights) <= 1e-12,
                 str_cat("differs from one process by ", difference(mine.weights, one.weights)));
  if (group.size() > 1) {
    ranks::require(mine.buckets >= 4, str_cat("only ", mine.buckets, " buckets"));
    ranks::require(mine.overlapped, "no first bucket was reduced before backward's last node ran");
  }
  // All ranks hold the same bits, and a second run with other delays as well.
  const Tensor weights = tensor(mine.weights), all = group.all_gather(weights);
  for (int r = 0; r < group.size(); ++r)
    ranks::require(all[r].to_vector<double>() == mine.weights,
                   str_cat("rank ", r, " holds other bits"));
  const Outcome again = train(group, {.most_delay_ms = 5, .delay_seed = 2});
  ranks::require(again.weights == mine.weights, "a second run gave other bits");

  const Setup ten{.dtype = DType::f32, .epochs = 2, .samples = 60};
  const double f32 = difference(train(group, ten).weights, train(dist::Group(), ten).weights);
  ranks::require(f32 <= 1e-5, str_cat("in f32 differs from one process by ", f32));
}

}  // namespace

TEST_CASE("ranks as threads equal one process") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(dist::run_local(size, check_rank, {.timeout = std::chrono::seconds(20)}));
  }
}

TEST_CASE("rank: equality" * doctest::skip()) {
  auto group = dist::init({.timeout = std::chrono::seconds(20)});
  REQUIRE(group.backend() == "shm");
  CHECK_NOTHROW(check_rank(group));
}
TEST_CASE("ranks as processes equal one process") {
  for (int size = 2; size <= 4; ++size) {
    CAPTURE(size);
    const auto ended = ranks::run_ranks(size, "rank: equality", {.deadline = 60});
    CHECK(ranks::failures(ended) == "");
  }
}

// ---- the same with a fault planted must be noticed ----

namespace {

enum class Fault { none, sum_for_mean, chunk_skipped, buckets_swapped, not_awaited };

/// A finished operation that then does `after`, or one that claims to be finished.
class FaultyWork final : public dist::Work {
 public:
  FaultyWork(dist::WorkPtr inner, std::function<void()> after, bool awaited)
      : inner_(std::move(inner)), after_(std::move(after)), awaited_(awaited) {}
  void wait(dist::Milliseconds timeout) override {
    if (!awaited_) return;
    inner_->wait(timeout);
    if (after_) std::exchange(after_, nullptr)();
  }
  bool is_completed() override { return inner_->is_completed(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  uint64_t sequence_number() const override { return inner_->sequence_number(); }
  std::vector<Tensor> result() const override { return inner_->result(); }

 private:
  dist::WorkPtr inner_;
  std::function<void()> after_;
  bool awaited_;
};

class FaultyGroup final : public dist::WrappedGroup {
 public:
  FaultyGroup(std::shared_ptr<ProcessGroup> inner, Fault fault)
      : WrappedGroup(std::move(inner)), fault_(fault) {}
  std::shared_ptr<ProcessGroup> child() override {
    return std::make_shared<FaultyGroup>(inner_->child(), fault_);
  }
  dist::WorkPtr start(dist::Collective call) override {
    const Tensor t = call.model();
    const bool bucket = call.kind == dist::CollectiveKind::all_reduce && t.dim() == 1;
    if (fault_ == Fault::none || !bucket) return inner_->start(std::move(call));
    if (fault_ == Fault::sum_for_mean) {
      call.reduce = dist::ReduceOp::sum;
      return inner_->start(std::move(call));
    }
    std::function<void()> after;
    if (fault_ == Fault::chunk_skipped) {
      const Tensor mine = t.narrow(0, 0, 16).clone();
      after = [t, mine] { t.narrow(0, 0, 16).copy_(mine); };
    }
    if (fault_ == Fault::buckets_swapped && last_.defined()) {
      const int64_t n = std::min(last_.numel(), t.numel());
      after = [a = last_.narrow(0, 0, n), b = t.narrow(0, 0, n)]() mutable {
        const Tensor kept = a.clone();
        a.copy_(b);
        b.copy_(kept);
      };
      last_ = Tensor();
    } else {
      last_ = t;
    }
    return std::make_shared<FaultyWork>(inner_->start(std::move(call)), after,
                                        fault_ != Fault::not_awaited);
  }

 private:
  Fault fault_;
  Tensor last_;
};

double difference_with(Fault fault) {
  const Outcome one = train(dist::Group(), {});
  std::atomic<double> most = 0;
  dist::run_local(2,
                  [&](dist::Group group) {
                    const auto faulty = std::make_shared<FaultyGroup>(group.shared(), fault);
                    double d = 0;
                    try {
                      const Outcome mine = train(dist::Group(faulty), {.most_delay_ms = 3});
                      d = difference(mine.weights, one.weights);
                    } catch (const DistError& e) {  // DDP compares the ranks' parameters itself
                      if (!contains(e.what(), "has other values than on rank 0")) throw;
                      d = INFINITY;
                    }
                    for (double m = most; d > m && !most.compare_exchange_weak(m, d);) {
                    }
                  },
                  {.timeout = std::chrono::seconds(20)});
  return most;
}

}  // namespace

TEST_CASE("planted faults are noticed") {
  CHECK(difference_with(Fault::none) <= 1e-12);
  CHECK(difference_with(Fault::sum_for_mean) > 1e-12);
  CHECK(difference_with(Fault::chunk_skipped) > 1e-12);
#ifndef __SANITIZE_THREAD__  // these are races, and would be reported as such
  CHECK(difference_with(Fault::buckets_swapped) > 1e-12);
  CHECK(difference_with(Fault::not_awaited) > 1e-12);
#endif
}

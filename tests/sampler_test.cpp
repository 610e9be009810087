// Who sees which sample: every rule of sharding checked over all small cases, and PyTorch's
// DistributedSampler.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include <lockstep/data/sampler.h>
#include <lockstep/tensor/warning.h>

using namespace lockstep;
using data::BatchPlan;
using data::Shard;

namespace {

std::vector<int64_t> iota(int64_t n) {
  std::vector<int64_t> v(static_cast<size_t>(n));
  std::iota(v.begin(), v.end(), int64_t{0});
  return v;
}

// The global batches as lists of positions.
std::vector<data::Range> global_batches(const BatchPlan& plan) {
  std::vector<data::Range> all;
  for (int64_t i = 0; i < plan.batches(); ++i) all.push_back(plan.global(i));
  return all;
}

}  // namespace

TEST_CASE(
    "BatchPlan covers every sample once, evenly, with the same number of batches on each rank") {
  for (int size = 1; size <= 5; ++size)
    for (int64_t batch = 1; batch <= 4; ++batch)
      for (int64_t n = size; n <= 45; ++n) {
        CAPTURE(size);
        CAPTURE(batch);
        CAPTURE(n);
        std::vector<BatchPlan> ranks;
        for (int r = 0; r < size; ++r) ranks.emplace_back(n, batch, false, Shard{r, size});
        int64_t next = 0;  // pieces follow one another: by batch, then by rank
        for (int64_t i = 0; i < ranks[0].batches(); ++i) {
          int64_t least = n, most = 0;
          REQUIRE(ranks[0].global(i).begin == next);
          for (const BatchPlan& plan : ranks) {
            REQUIRE(plan.batches() == ranks[0].batches());
            REQUIRE(plan.global(i) == ranks[0].global(i));
            const data::Range part = plan.local(i);
            REQUIRE(part.begin == next);
            next = part.end;
            least = std::min(least, part.size());
            most = std::max(most, part.size());
          }
          REQUIRE(ranks[0].global(i).end == next);
          REQUIRE(least >= (size > 1 ? std::min<int64_t>({batch, 2, n / size}) : 1));
          REQUIRE(most <= batch + (size > 1 ? 2 : 0));
          REQUIRE(most - least <= 1);
          const bool last = i == ranks[0].batches() - 1;
          if (!last) REQUIRE(ranks[0].global(i).size() == batch * size);
        }
        REQUIRE(next == n);
        // on one rank as in PyTorch; else a batch of its own has two samples for each rank
        const int64_t full = n / (batch * size), remainder = n % (batch * size),
                      own = size == 1    ? 1
                            : batch == 1 ? size
                                         : 2 * size;
        REQUIRE(ranks[0].batches() == std::max<int64_t>(full + (remainder >= own ? 1 : 0), 1));
        REQUIRE(ranks[0].has_single() == (size > 1 && batch > 1 && n < 2 * size));
      }
}

TEST_CASE("BatchPlan: the cases of the rule, by hand") {
  // 16 samples, 2 ranks x 3: 6 6 4, two each in the last
  BatchPlan even(16, 3, false, {1, 2});
  CHECK(global_batches(even) == std::vector<data::Range>{{0, 6}, {6, 12}, {12, 16}});
  CHECK(even.local(0) == data::Range{3, 6});
  CHECK(even.local(2) == data::Range{14, 16});
  // 15: two ranks would get 2 and 1, so the remainder joins the batch before: 6 9
  CHECK(global_batches(BatchPlan(15, 3, false, {0, 2})) ==
        std::vector<data::Range>{{0, 6}, {6, 15}});
  // one rank: the remainder is a batch, whatever its size
  CHECK(global_batches(BatchPlan(7, 6, false, {})) == std::vector<data::Range>{{0, 6}, {6, 7}});
  // batches of one sample a rank: a remainder smaller than the number of ranks joins
  CHECK(global_batches(BatchPlan(5, 1, false, {0, 2})) == std::vector<data::Range>{{0, 2}, {2, 5}});
  // 9 samples: the last one joins the batch before: 4 5, split 3 + 2
  CHECK(global_batches(BatchPlan(9, 2, false, {0, 2})) == std::vector<data::Range>{{0, 4}, {4, 9}});
  CHECK(BatchPlan(9, 2, false, {0, 2}).local(1) == data::Range{4, 7});
  CHECK(BatchPlan(9, 2, false, {1, 2}).local(1) == data::Range{7, 9});
  // less than one full batch, enough to go round
  CHECK(global_batches(BatchPlan(3, 2, false, {0, 2})) == std::vector<data::Range>{{0, 3}});
  // drop_last keeps full batches only
  CHECK(global_batches(BatchPlan(11, 2, true, {0, 2})) == std::vector<data::Range>{{0, 4}, {4, 8}});
}

TEST_CASE(
    "BatchPlan: global batches do not depend on the number of ranks while batch x ranks stays") {
  for (int64_t n : {24, 28, 30, 48, 100})
    for (int size : {1, 2, 4}) {
      CAPTURE(n);
      if (n % 8 != 0 && n % 8 < 2 * size) continue;  // too few for two each: it joins
      CHECK(global_batches(BatchPlan(n, 8 / size, false, {0, size})) ==
            global_batches(BatchPlan(n, 8, false, {0, 1})));
    }
}

TEST_CASE(
    "BatchPlan resumed in the middle is the rest of the whole, at another number of ranks too") {
  const auto whole = global_batches(BatchPlan(106, 8, false, {0, 2}));
  for (size_t done = 0; done <= whole.size(); ++done)
    for (int size : {1, 2, 4}) {
      const int64_t start = done ? whole[done - 1].end : 0;
      const auto rest = global_batches(BatchPlan(106, 16 / size, false, {size - 1, size}, start));
      CHECK(rest ==
            std::vector<data::Range>(whole.begin() + static_cast<ptrdiff_t>(done), whole.end()));
    }
}

TEST_CASE("BatchPlan: plans that cannot be") {
  CHECK_THROWS_WITH_AS(BatchPlan(3, 2, false, (Shard{0, 4})),
                       "BatchPlan: 3 samples, fewer than 4 ranks; use fewer ranks", ValueError);
  CHECK_THROWS_WITH_AS(BatchPlan(0, 2, false, {}), "BatchPlan: there are no samples", ValueError);
  CHECK_THROWS_WITH_AS(
      BatchPlan(65, 32, false, (Shard{0, 2}), 64),
      "BatchPlan: 1 samples are left in this epoch, fewer than 2 ranks; use fewer ranks, or resume "
      "at the next epoch",
      ValueError);
  CHECK_THROWS_AS(BatchPlan(7, 4, true, (Shard{0, 2})), ValueError);  // drop_last leaves nothing
  CHECK_THROWS_AS(BatchPlan(7, 0, false, {}), ValueError);
  CHECK_THROWS_AS(BatchPlan(7, std::numeric_limits<int64_t>::max(), false, (Shard{0, 2})),
                  ValueError);
  CHECK_THROWS_AS(BatchPlan(7, 1, false, (Shard{2, 2})), ValueError);
  CHECK_THROWS_AS(BatchPlan(7, 1, false, (Shard{-1, 2})), ValueError);
  CHECK_THROWS_AS(BatchPlan(7, 1, false, {}, 8), ValueError);
  CHECK_THROWS_AS(BatchPlan(100, 8, false, (Shard{0, 4}), 98), ValueError);  // 2 left for 4
  CHECK(BatchPlan(100, 8, false, {0, 4}, 100).batches() == 0);
  CHECK_THROWS_AS(BatchPlan(8, 4, false, {}).local(2), IndexError);
}

TEST_CASE("epoch_order is a permutation that depends on seed and epoch, not on their sum") {
  const auto order = [](uint64_t seed, int64_t epoch) {
    return data::epoch_order(100, {seed, epoch}, true);
  };
  auto sorted = order(0, 0);
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted == iota(100));
  CHECK(order(0, 0) == order(0, 0));
  std::set<std::vector<int64_t>> different;
  for (uint64_t seed = 0; seed < 5; ++seed)
    for (int64_t epoch = 0; epoch < 5; ++epoch) different.insert(order(seed, epoch));
  CHECK(different.size() == 25);
  CHECK(data::epoch_order(5, {1, 2}, false) == iota(5));
}

TEST_CASE("DistributedSampler: 10 samples on 4 ranks, as PyTorch does it") {
  for (bool drop_last : {false, true})
    for (bool shuffle : {false, true}) {
      std::multiset<int64_t> seen;
      for (int rank = 0; rank < 4; ++rank) {
        data::DistributedSampler sampler(
            10, {.shard = {rank, 4}, .shuffle = shuffle, .drop_last = drop_last});
        CHECK(sampler.size() == (drop_last ? 2 : 3));
        const auto mine = sampler.indices();
        CHECK(mine.size() == static_cast<size_t>(sampler.size()));
        seen.insert(mine.begin(), mine.end());
        if (!shuffle && !drop_last) {
          // dealt round-robin, then once more from the beginning: 0 1 2 ... 9 0 1
          const std::vector<std::vector<int64_t>> expected{
              {0, 4, 8}, {1, 5, 9}, {2, 6, 0}, {3, 7, 1}};
          CHECK(mine == expected[static_cast<size_t>(rank)]);
        }
      }
      const std::set<int64_t> distinct(seen.begin(), seen.end());
      CHECK(seen.size() == (drop_last ? 8 : 12));
      CHECK(distinct.size() == (drop_last ? 8 : 10));
    }
}

TEST_CASE(
    "DistributedSampler: fewer samples than ranks repeats the beginning as often as it takes") {
  std::vector<int64_t> all;
  for (int rank = 0; rank < 7; ++rank) {
    data::DistributedSampler sampler(3, {.shard = {rank, 7}, .shuffle = false});
    REQUIRE(sampler.size() == 1);
    all.push_back(sampler.indices()[0]);
  }
  CHECK(all == std::vector<int64_t>{0, 1, 2, 0, 1, 2, 0});
}

TEST_CASE(
    "DistributedSampler: the order changes with set_epoch, and a forgotten one is pointed out "
    "once") {
  std::vector<std::string> warnings;
  set_warning_handler([&](const std::string& text) { warnings.push_back(text); });
  data::DistributedSampler forgetful(10, {.shard = {1, 4}});
  const auto first = forgetful.indices();
  CHECK(warnings.empty());
  CHECK(forgetful.indices() == first);
  CHECK(forgetful.indices() == first);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("sampler.set_epoch(epoch)") != std::string::npos);

  data::DistributedSampler good(100, {.shard = {1, 4}});
  std::set<std::vector<int64_t>> different;
  for (int epoch = 0; epoch < 4; ++epoch) {
    good.set_epoch(epoch);
    different.insert(good.indices());
    CHECK(good.indices() == std::as_const(good)(epoch));
  }
  CHECK(different.size() == 4);
  CHECK(warnings.size() == 1);
  set_warning_handler({});
}

TEST_CASE("DistributedSampler: what is left is dealt anew, to any number of ranks") {
  const auto whole = data::epoch_order(29, {.seed = 0, .epoch = 2}, true);
  for (bool drop_last : {false, true})
    for (int size : {1, 2, 3, 7})
      for (int64_t done = 0; done <= 31; ++done) {
        CAPTURE(size);
        CAPTURE(done);
        const int64_t left = std::max<int64_t>(29 - done, 0),
                      each = drop_last ? left / size : (left + size - 1) / size;
        for (int rank = 0; rank < size; ++rank) {
          const data::DistributedSampler sampler(29,
                                                 {.shard = {rank, size}, .drop_last = drop_last});
          const auto mine = sampler(2, done);
          REQUIRE(static_cast<int64_t>(mine.size()) == each);
          for (int64_t i = 0; i < each; ++i)
            REQUIRE(mine[static_cast<size_t>(i)] ==
                    whole[static_cast<size_t>((done + rank + i * size) % 29)]);
          // a run of the same number of ranks goes on as if it had not stopped
          if (done % size == 0 && done <= 29 && !drop_last) {
            const auto all = sampler(2);
            REQUIRE(std::equal(mine.begin(), mine.end(), all.begin() + done / size, all.end()));
          }
        }
      }
  CHECK_THROWS_AS(data::DistributedSampler(5)(0, -1), ValueError);
  CHECK_THROWS_AS(data::DistributedSampler(5)(0, int64_t{1} << 62), ValueError);
}

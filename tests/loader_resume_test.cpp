// Loader: passes that go on in the middle, by every way, on any number of ranks.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include <lockstep/tensor/warning.h>

#include "loader_helpers.h"

using namespace loader_helpers;

TEST_CASE(
    "Loader: resumed in any way at any number of ranks and batch size, each sample is seen once") {
  constexpr int64_t n = 127;
  set_warning_handler([](const std::string&) {});  // of last batches of one
  const auto sharded = [](int64_t batch, int rank, int size) {
    return data::LoaderOptions{
        .batch_size = batch, .shuffle = true, .seed = 3, .shard = {rank, size}};
  };
  const auto sampled = [](int64_t batch, int rank, int size) {
    return data::LoaderOptions{
        .batch_size = batch,
        .sampler = data::DistributedSampler(n, {.shard = {rank, size}, .seed = 3})};
  };
  for (const bool sampler : {false, true})
    for (int before : {1, 2, 3, 5})
      for (int after : {1, 2, 3, 4, 7})
        for (int stop = 1; stop <= 7; stop += 2) {
          CAPTURE(sampler);
          CAPTURE(before);
          CAPTURE(after);
          CAPTURE(stop);
          const auto make = [&](int64_t batch, int rank, int size) {
            return sampler ? sampled(batch, rank, size) : sharded(batch, rank, size);
          };
          std::multiset<int64_t> seen;
          const auto see = [&](const Tensor& x) {
            for (int64_t v : x.to_vector<int64_t>()) seen.insert(v);
          };
          data::LoaderState state;
          NamedTensors dict;
          for (int rank = before; rank-- > 0;) {
            data::Loader loader{numbers(n), make(3, rank, before)};
            int batches = 0;
            for (auto [x] : loader.epoch(1)) {
              see(x);
              state = loader.state();
              dict = loader.state_dict();
              if (++batches == stop) break;
            }
          }
          CHECK(state == data::LoaderState{1, int64_t{3} * before * stop});
          std::set<size_t> batches;
          for (int rank = 0; rank < after; ++rank) {
            data::Loader loader{numbers(n), make(4, rank, after)};
            stop % 2 ? loader.resume(state) : loader.load_state_dict(dict);
            auto pass = loader.epoch(1);
            batches.insert(static_cast<size_t>(pass.size()));
            for (auto [x] : pass) see(x);
            CHECK(loader.state() == data::LoaderState{2, 0});
          }
          REQUIRE(std::set<int64_t>(seen.begin(), seen.end()).size() == n);
          CHECK(batches.size() == 1);
          // PyTorch's sampler repeats some at the end, so that each rank has equally many
          REQUIRE(seen.size() == (sampler ? n + (after - (n - state.samples) % after) % after : n));
        }
  set_warning_handler({});
}

TEST_CASE("Loader: a sampler that cannot deal the rest is told what it can go on from") {
  struct Fixed {  // deals 0, 1, 2, ... and cannot begin in the middle
    data::Shard part;
    data::Shard shard() const { return part; }
    std::vector<int64_t> operator()(int64_t) const {
      return data::DistributedSampler(120, {.shard = part, .shuffle = false})(0);
    }
  };
  data::Loader five{numbers(120), {.batch_size = 5, .sampler = Fixed{{1, 5}}}};
  CHECK_THROWS_WITH_AS(five.resume({.epoch = 0, .samples = 24}),
                       doctest::Contains("24 samples are done, which is not the same number"),
                       ValueError);
  five.resume({.epoch = 0, .samples = 110});
  CHECK(collect(five, 0) == Batches{{111, 116}});
  // one for all ranks together
  data::Loader own{numbers(4), {.batch_size = 2, .sampler = [](int64_t) {
                                  return std::vector<int64_t>{3, 2, 1, 0};
                                }}};
  own.resume({.epoch = 0, .samples = 3});
  CHECK(collect(own, 0) == Batches{{0}});
  CHECK_THROWS_WITH_AS(own.resume({.epoch = 0, .samples = 5}), doctest::Contains("it gives 4"),
                       ValueError);
  // the order of another kind
  data::Loader plain{numbers(4), {.batch_size = 2}};
  for (auto [x] : own.epoch(0)) {
    CHECK_THROWS_AS(plain.load_state_dict(own.state_dict()), ValueError);
    break;
  }
}

TEST_CASE("Loader: a loop resumed in the middle goes on as if it had never stopped") {
  const auto options = [](int workers, int rank, int size) {
    return data::LoaderOptions{.batch_size = 8 / size,
                               .shuffle = true,
                               .workers = workers,
                               .seed = 9,
                               .shard = {rank, size}};
  };
  for (int workers : {0, 2})
    for (size_t stop = 0; stop < 13; ++stop) {
      data::Loader whole{numbers(100), options(0, 0, 1)};
      const Batches expected = collect(whole, 4);
      CHECK(whole.state() == data::LoaderState{5, 0});

      data::Loader first{numbers(100), options(workers, 0, 1)};
      size_t i = 0;
      data::LoaderState state;
      for (auto [x] : first.epoch(4)) {
        state = first.state();
        (void)x;
        if (i++ == stop) break;
      }
      CHECK(state.epoch == 4);
      CHECK(state.samples == static_cast<int64_t>(std::min<size_t>(8 * (stop + 1), 100)));

      // at another number of ranks
      Batches rest(expected.size() - stop - 1);
      for (int rank = 0; rank < 2; ++rank) {
        data::Loader second{numbers(100), options(workers, rank, 2)};
        second.resume(state);
        CHECK(second.state() == state);
        const Batches mine = collect(second, 4);
        REQUIRE(mine.size() == rest.size());
        for (size_t k = 0; k < mine.size(); ++k)
          rest[k].insert(rest[k].end(), mine[k].begin(), mine[k].end());
        CHECK(second.state() == data::LoaderState{5, 0});
        CHECK(collect(second, 5).size() == expected.size());  // resuming is for one pass
      }
      CHECK(rest == Batches(expected.begin() + static_cast<ptrdiff_t>(stop) + 1, expected.end()));
    }
}

TEST_CASE("Loader: resuming elsewhere than the loop starts is an error, not a silent restart") {
  data::Loader loader{numbers(10)};
  loader.resume({.epoch = 3, .samples = 5});
  CHECK_THROWS_WITH_AS(loader.epoch(0),
                       "Loader: resume() asked for epoch 3 and epoch(0) was called; start the loop "
                       "over epochs at state.epoch",
                       ValueError);
  CHECK(collect(loader, 3).size() == 5);
  CHECK_THROWS_AS(loader.resume({.epoch = 0, .samples = 11}), ValueError);
  CHECK_THROWS_AS(loader.resume({.epoch = -1, .samples = 0}), ValueError);
  CHECK(collect(loader, 0).size() == 10);  // nothing has changed
}

TEST_CASE(
    "Loader: the state as tensors: back where it was, unless the order of samples is another") {
  const auto options = [](uint64_t seed, bool shuffle) {
    return data::LoaderOptions{.batch_size = 4, .shuffle = shuffle, .seed = seed};
  };
  data::Loader first{numbers(10), options(3, true)};
  for (auto [x] : first.epoch(2)) {
    (void)x;
    break;
  }
  const NamedTensors middle = first.state_dict();
  collect(first, 2);
  const NamedTensors start = first.state_dict();

  data::Loader same{numbers(10), options(3, true)};
  same.load_state_dict(middle);
  CHECK(same.state() == data::LoaderState{2, 4});
  CHECK(collect(same, 2).size() == 2);

  data::Loader other_seed{numbers(10), options(4, true)}, plain{numbers(10), options(3, false)},
      other_size{numbers(11), options(3, true)};
  for (auto* other : {&other_seed, &plain, &other_size}) {
    CHECK_THROWS_AS(other->load_state_dict(middle), ValueError);
    CHECK(other->state() == data::LoaderState{0, 0});
    other->load_state_dict(start);  // a new epoch may be anything
    CHECK(other->state() == data::LoaderState{3, 0});
  }
  NamedTensors more = middle;
  more.emplace_back("extra", ones({}));
  CHECK_THROWS_WITH_AS(same.load_state_dict(more), doctest::Contains("unexpected: extra"),
                       ValueError);
}

TEST_CASE("Loader: copies have positions of their own, moves keep a running pass, passes overlap") {
  data::Loader loader{numbers(12), {.batch_size = 2, .workers = 1}};
  auto first = loader.epoch(0);
  auto it = first.begin();
  ++it;
  data::Loader copy = loader;
  CHECK(copy.state() == data::LoaderState{0, 4});
  CHECK(collect(copy, 5).size() == 6);
  CHECK(loader.state() == data::LoaderState{0, 4});
  // a pass that began later moves the position, the earlier one no more
  auto second = loader.epoch(3);
  auto later = second.begin();
  ++it;
  CHECK(loader.state() == data::LoaderState{3, 2});
  ++later;
  CHECK(loader.state() == data::LoaderState{3, 4});
  data::Loader moved = std::move(loader);
  ++later;
  CHECK(moved.state() == data::LoaderState{3, 6});
  CHECK(std::get<0>(*it).to_vector<int64_t>() == std::vector<int64_t>{4, 5});
  // resume() while a pass runs stands, whatever the pass still does
  moved.resume({.epoch = 7, .samples = 10});
  ++later;
  CHECK(moved.state() == data::LoaderState{7, 10});
  CHECK(collect(moved, 7) == Batches{{10, 11}});
  copy = moved;
  CHECK(copy.state() == data::LoaderState{8, 0});
}

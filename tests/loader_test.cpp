// The loader: the same batches whatever the workers, errors that reach the loop, loops left early,
// resuming, and the shapes of datasets it takes.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include <lockstep/data/loader.h>
#include <lockstep/data/random_shift.h>
#include <lockstep/data/tensor_dataset.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/parallel.h>

using namespace lockstep;
using namespace std::chrono_literals;

namespace {

using Batches = std::vector<std::vector<int64_t>>;

data::TensorDataset<1> numbers(int64_t n) { return data::TensorDataset{arange(0, n)}; }

template <class L>
Batches collect(L& loader, int64_t epoch) {
  Batches all;
  for (auto [x] : loader.epoch(epoch)) all.push_back(x.template to_vector<int64_t>());
  return all;
}

int thread_count() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
  return -1;
}

// Samples are their index; `at` is called with it on whichever thread makes it.
struct Probe {
  int64_t n = 0;
  std::function<void(int64_t)> at;
  int64_t size() const { return n; }
  int64_t get(int64_t index) const {
    if (at) at(index);
    return index;
  }
};

}  // namespace

TEST_CASE("batches come in order, whatever the number of workers, also when the first are slow") {
  const Probe probe{103, [](int64_t i) {
                      std::this_thread::sleep_for(std::chrono::microseconds(i % 7 == 0 ? 400 : 10));
                    }};
  Batches expected;
  for (int workers : {0, 1, 2, 5})
    for (int prefetch : {1, 3}) {
      data::Loader loader{
          probe,
          {.batch_size = 4, .shuffle = true, .workers = workers, .prefetch = prefetch, .seed = 3}};
      CHECK(loader.size() == 26);
      Batches got;
      for (Tensor x : loader.epoch(7)) got.push_back(x.to_vector<int64_t>());
      if (expected.empty()) expected = got;
      CHECK(got == expected);
    }
  std::set<int64_t> seen;
  for (const auto& batch : expected) seen.insert(batch.begin(), batch.end());
  CHECK(seen.size() == 103);
  CHECK(expected.back().size() == 3);
}

TEST_CASE("epochs differ, and repeat when asked again") {
  data::Loader loader{numbers(50), {.batch_size = 10, .shuffle = true, .workers = 2}};
  const Batches first = collect(loader, 0);
  CHECK(collect(loader, 1) != first);
  CHECK(collect(loader, 0) == first);
  data::Loader other{numbers(50), {.batch_size = 10, .shuffle = true, .seed = 1}};
  CHECK(collect(other, 0) != first);
  data::Loader plain{numbers(5), {.batch_size = 2}};
  CHECK(collect(plain, 3) == Batches{{0, 1}, {2, 3}, {4}});
}

TEST_CASE("ranks share the global batch; together they see what one would") {
  data::Loader one{numbers(103), {.batch_size = 12, .shuffle = true, .seed = 5}};
  const Batches whole = collect(one, 2);
  for (int size : {2, 3, 4}) {
    Batches joined(whole.size());
    for (int rank = 0; rank < size; ++rank) {
      data::Loader loader{numbers(103),
                          {.batch_size = 12 / size,
                           .shuffle = true,
                           .workers = rank % 3,
                           .seed = 5,
                           .shard = {rank, size}}};
      const Batches mine = collect(loader, 2);
      REQUIRE(mine.size() == whole.size());
      for (size_t i = 0; i < mine.size(); ++i)
        joined[i].insert(joined[i].end(), mine[i].begin(), mine[i].end());
    }
    CHECK(joined == whole);
  }
}

TEST_CASE("workers are bounded in how far they run ahead") {
  std::atomic<int64_t> made{0};
  data::Loader loader{Probe{100, [&](int64_t) { ++made; }},
                      {.batch_size = 1, .workers = 2, .prefetch = 3}};
  int64_t taken = 0;
  for (Tensor x : loader.epoch(0)) {
    ++taken;
    if (taken % 20 == 0) std::this_thread::sleep_for(20ms);
    REQUIRE(made <= taken + 6);
    (void)x;
  }
  CHECK(taken == 100);
  CHECK(made == 100);
}

TEST_CASE(
    "an error in a worker reaches the loop in its turn, unchanged, and every thread is gone") {
  const int before = thread_count();
  for (int workers : {0, 1, 3}) {
    CAPTURE(workers);
    data::Loader loader{
        Probe{40,
              [](int64_t i) { LOCKSTEP_CHECK(i != 22, IndexError, "sample ", i, " is broken"); }},
        {.batch_size = 4, .workers = workers}};
    int64_t batches = 0;
    std::string text;
    auto epoch = loader.epoch(0);  // outlives the error: the threads must not
    try {
      for (Tensor x : epoch) batches += x.size(0) / 4;
    } catch (const IndexError& e) {
      text = e.what();
      CHECK(thread_count() == before);
    }
    CHECK(batches == 5);
    CHECK(text.find("sample 22 is broken") == 0);
    CHECK(text.find("in Loader: batch 5 of epoch 0, samples 20, ...") != std::string::npos);
    CHECK(loader.state() == data::LoaderState{0, 20});
  }
  // an exception that is none of ours passes through as it is
  data::Loader loader{Probe{4, [](int64_t) { throw 42; }}, {.workers = 2}};
  CHECK_THROWS_AS(loader.epoch(0).begin(), int);
  CHECK(thread_count() == before);
}

TEST_CASE("leaving the loop early stops the workers at once") {
  const int before = thread_count();
  std::atomic<int64_t> made{0};
  data::Loader loader{Probe{100'000,
                            [&](int64_t) {
                              ++made;
                              std::this_thread::sleep_for(100us);
                            }},
                      {.batch_size = 1, .workers = 3}};
  const auto start = std::chrono::steady_clock::now();
  for (Tensor x : loader.epoch(0)) {
    if (x.item<int64_t>() == 3) break;
  }
  CHECK(thread_count() == before);
  CHECK(made <= 4 + 6);
  CHECK(std::chrono::steady_clock::now() - start < 5s);
  CHECK(collect(*std::make_unique<data::Loader<data::TensorDataset<1>>>(numbers(4)), 0).size() ==
        4);
}

TEST_CASE("an epoch that is never walked starts no thread; one is walked once") {
  const int before = thread_count();
  data::Loader loader{numbers(10), {.batch_size = 2, .workers = 2}};
  {
    auto epoch = loader.epoch(0);
    CHECK(epoch.size() == 5);
    CHECK(thread_count() == before);
    int64_t n = 0;
    for (auto it = epoch.begin(); it != epoch.end(); ++it) ++n;
    CHECK(n == 5);
    CHECK_THROWS_AS(epoch.begin(), Error);
  }
  CHECK(thread_count() == before);
}

TEST_CASE("an epoch outlives its loader") {
  auto epoch = data::Loader{numbers(10), {.batch_size = 5, .workers = 1}}.epoch(0);
  int64_t sum = 0;
  for (auto [x] : epoch)
    for (int64_t v : x.to_vector<int64_t>()) sum += v;
  CHECK(sum == 45);
}

TEST_CASE(
    "workers run with one thread and without gradients, and leave the caller's settings alone") {
  const Tensor x = arange(0, 8, 1, {.dtype = DType::f32}).requires_grad_();
  std::atomic<int> wrong{0};
  const int threads = get_num_threads();
  for (int workers : {0, 2}) {
    data::Loader loader{
        Probe{8,
              [&](int64_t) { wrong += is_grad_enabled() || (workers && get_num_threads() != 1); }},
        {.batch_size = 2, .workers = workers}};
    for (Tensor b : loader.epoch(0)) CHECK(!b.requires_grad());
  }
  CHECK(wrong == 0);
  CHECK(is_grad_enabled());
  CHECK(get_num_threads() == threads);
  data::Loader loader{data::TensorDataset{x}, {.batch_size = 2}};
  for (auto [b] : loader.epoch(0)) CHECK(!b.requires_grad());
}

TEST_CASE("a loop resumed in the middle goes on as if it had never stopped") {
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

TEST_CASE("resuming elsewhere than the loop starts is an error, not a silent restart") {
  data::Loader loader{numbers(10)};
  loader.resume({.epoch = 3, .samples = 5});
  CHECK_THROWS_WITH_AS(loader.epoch(0),
                       "Loader: resume() asked for epoch 3 and epoch(0) was called; start the loop "
                       "over epochs at state.epoch",
                       ValueError);
  CHECK(collect(loader, 3).size() == 5);
  loader.resume({.epoch = 0, .samples = 11});
  CHECK_THROWS_AS(loader.epoch(0), ValueError);
}

TEST_CASE("options that make no sense") {
  using data::Loader;
  CHECK_THROWS_AS(Loader(numbers(10), {.batch_size = 0}), ValueError);
  CHECK_THROWS_AS(Loader(numbers(10), {.workers = -1}), ValueError);
  CHECK_THROWS_AS(Loader(numbers(10), {.prefetch = 0}), ValueError);
  CHECK_THROWS_AS(Loader(numbers(3), {.shard = {0, 4}}), ValueError);
  CHECK_THROWS_AS(Loader(numbers(3), {.batch_size = 4, .drop_last = true}), ValueError);
  CHECK_THROWS_AS(Loader(numbers(3), {.shuffle = true,
                                      .sampler = [](int64_t) { return std::vector<int64_t>{0}; }}),
                  ValueError);
  Loader bad{numbers(3), {.sampler = [](int64_t) { return std::vector<int64_t>{0, 3}; }}};
  CHECK_THROWS_AS(bad.epoch(0), IndexError);
  CHECK_THROWS_AS(Loader{numbers(3)}.epoch(-1), ValueError);
}

TEST_CASE("a sampler of one's own, and PyTorch's") {
  data::Loader mine{numbers(10), {.batch_size = 2, .sampler = [](int64_t epoch) {
                                    return std::vector<int64_t>{epoch, 9, 0};
                                  }}};
  CHECK(collect(mine, 4) == Batches{{4, 9}, {0}});

  std::multiset<int64_t> seen;
  Batches first_epochs;
  for (int rank = 0; rank < 4; ++rank) {
    data::DistributedSampler sampler(10, {.shard = {rank, 4}});
    data::Loader loader{numbers(10), {.batch_size = 2, .sampler = sampler}};
    const Batches batches = collect(loader, 1);
    CHECK(batches.size() == 2);
    for (const auto& b : batches) seen.insert(b.begin(), b.end());
    CHECK(collect(loader, 2) != batches);
  }
  CHECK(seen.size() == 12);
}

// ---- datasets ----

namespace {

struct Example {
  Tensor image;
  int64_t label;
  float weight;
};
struct Examples {
  int64_t size() const { return 5; }
  Example get(int64_t i) const {
    return {full({2, 3}, static_cast<double>(i)), i, 0.5f * static_cast<float>(i)};
  }
};

struct Ragged {
  int64_t size() const { return 4; }
  Tensor get(int64_t i) const { return zeros({i < 3 ? 2 : 3}); }
};

struct Own {
  int64_t value;
  virtual ~Own() = default;  // no aggregate
  explicit Own(int64_t v) : value(v) {}
};
std::string collate(const std::vector<Own>& samples) {
  std::string s;
  for (const Own& o : samples) s += std::to_string(o.value);
  return s;
}
struct OwnSamples {
  int64_t size() const { return 4; }
  Own get(int64_t i) const { return Own(i); }
};

struct Owned {  // cannot be copied
  std::unique_ptr<int> value = std::make_unique<int>(7);
  int64_t size() const { return 2; }
  std::pair<bool, double> get(int64_t) const { return {true, *value}; }
};

struct Noisy {  // draws by the default generator and by the key
  int64_t size() const { return 32; }
  std::tuple<int64_t, Tensor, float> get(int64_t i, const data::RandomSource& random) const {
    return {i, rand({3}), data::Draws(random.key(i, data::Purpose::user)).uniform()};
  }
};

static_assert(data::Dataset<Examples> && !data::BatchDataset<Examples>);
static_assert(data::BatchDataset<data::TensorDataset<2>>);
static_assert(!data::Dataset<int> && !data::Dataset<std::vector<int64_t>>);

}  // namespace

TEST_CASE("samples are collated field by field") {
  data::Loader loader{Examples{}, {.batch_size = 2}};
  int64_t count = 0;
  for (auto [x, y, w] : loader.epoch(0)) {
    if (count++ != 1) continue;
    CHECK(x.shape() == Shape{2, 2, 3});
    CHECK(x.is_contiguous());
    CHECK(x.to_vector<int>() == std::vector<int>{2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3});
    CHECK(y.dtype() == DType::i64);
    CHECK(y.to_vector<int>() == std::vector<int>{2, 3});
    CHECK(w.dtype() == DType::f32);
    CHECK(w.to_vector<float>() == std::vector<float>{1, 1.5f});
  }
  CHECK(count == 3);

  std::string all;
  for (const std::string& s : data::Loader{OwnSamples{}, {.batch_size = 3}}.epoch(0))
    all += s + " ";
  CHECK(all == "012 3 ");

  for (auto [flag, value] : data::Loader{Owned{}, {.batch_size = 2, .workers = 1}}.epoch(0)) {
    CHECK(flag.dtype() == DType::boolean);
    CHECK(value.dtype() == DType::f64);
    CHECK(value.to_vector<double>() == std::vector<double>{7, 7});
  }
  auto shared = std::make_shared<Owned>();
  CHECK(&data::Loader{shared}.dataset() == shared.get());
}

TEST_CASE("samples of different shapes are pointed out") {
  data::Loader loader{Ragged{}, {.batch_size = 4, .workers = 1}};
  CHECK_THROWS_WITH_AS(loader.epoch(0).begin(),
                       doctest::Contains("sample 0 is [2], sample 3 is [3]; pad or crop them"),
                       ShapeError);
}

TEST_CASE("TensorDataset checks what it is given") {
  const Tensor x = arange(0, 6, 1, {.dtype = DType::f32}).view({3, 2}), y = arange(0, 3);
  data::TensorDataset both{x.t().contiguous().t(), y};  // strided
  CHECK(both.size() == 3);
  for (auto [a, b] : data::Loader{both, {.batch_size = 2}}.epoch(0)) {
    CHECK(a.is_contiguous());
    CHECK(a.select(1, 0).to_vector<int64_t>()[0] == 2 * b.to_vector<int64_t>()[0]);
  }
  CHECK_THROWS_AS((data::TensorDataset{x, arange(0, 4)}), ShapeError);
  CHECK_THROWS_AS((data::TensorDataset{scalar(1)}), ShapeError);
  const std::vector<int64_t> bad{3}, negative{-1};
  CHECK_THROWS_AS(both.get(bad), IndexError);
  CHECK_THROWS_AS(both.get(negative), IndexError);
}

TEST_CASE("randomness of a sample depends on seed, epoch and sample, not on who draws it") {
  const auto draws = [](int64_t epoch, uint64_t seed, int workers, int size) {
    std::map<int64_t, std::vector<float>> by_sample;
    for (int rank = 0; rank < size; ++rank) {
      data::Loader loader{Noisy{},
                          {.batch_size = 8 / size,
                           .shuffle = true,
                           .workers = workers,
                           .seed = seed,
                           .shard = {rank, size}}};
      for (auto [i, noise, key] : loader.epoch(epoch))
        for (int64_t k = 0; k < i.numel(); ++k) {
          auto values = noise[k].template to_vector<float>();
          values.push_back(key[k].template item<float>());
          by_sample[i[k].template item<int64_t>()] = values;
        }
    }
    return by_sample;
  };
  manual_seed(1);
  const auto expected = draws(0, 0, 0, 1);
  const float next = rand({1}).item<float>();
  manual_seed(1);
  CHECK(rand({1}).item<float>() == next);  // the caller's generator was as before
  REQUIRE(expected.size() == 32);
  for (int workers : {0, 1, 3})
    for (int size : {1, 2, 4}) CHECK(draws(0, 0, workers, size) == expected);
  CHECK(draws(1, 0, 0, 1) != expected);
  CHECK(draws(0, 1, 0, 1) != expected);
  std::set<std::vector<float>> distinct;
  for (const auto& [i, values] : expected) distinct.insert(values);
  CHECK(distinct.size() == 32);
}

TEST_CASE("map applies a function to batches, with or without their samples") {
  const auto twice = [](std::array<Tensor, 1> batch) {
    for (Tensor& t : batch) t = tensor<int64_t>({2 * t.to_vector<int64_t>()[0]}, {1});
    return batch;
  };
  data::Loader loader{data::map(numbers(3), twice), {.workers = 1}};
  CHECK(collect(loader, 0) == Batches{{0}, {2}, {4}});
  const auto with_samples = [](std::array<Tensor, 1>, std::span<const int64_t> indices,
                               const data::RandomSource& random) {
    return std::pair(indices[0], random.epoch);
  };
  data::Loader keyed{data::map(data::map(numbers(3), twice), with_samples)};
  std::vector<std::pair<int64_t, int64_t>> seen;
  for (auto pair : keyed.epoch(5)) seen.push_back(pair);
  CHECK(seen == std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {1, 5}, {2, 5}});
}

TEST_CASE("RandomShift moves whole images by every offset, and fills the border") {
  const int64_t n = 600;
  const Tensor x = zeros({n, 2, 5, 4});  // one bright pixel in each plane, at (2, 1) and (2, 2)
  for (int64_t i = 0; i < n; ++i) {
    x.data<float>()[i * 40 + 2 * 4 + 1] = 1;
    x.data<float>()[i * 40 + 20 + 2 * 4 + 2] = 2;
  }
  const data::TensorDataset images{x, arange(0, n)};
  data::Loader loader{data::map(images, data::RandomShift{.pixels = 1, .fill = -1}),
                      {.batch_size = n}};
  std::map<std::pair<int64_t, int64_t>, int> offsets;
  for (auto [y, labels] : loader.epoch(0)) {
    CHECK(labels.numel() == n);
    REQUIRE(y.shape() == x.shape());
    for (int64_t i = 0; i < n; ++i) {
      const float* first = y.data<float>() + i * 40;
      const int64_t at = std::find(first, first + 20, 1.0f) - first,
                    second = std::find(first + 20, first + 40, 2.0f) - first - 20;
      REQUIRE(at < 20);
      const int64_t down = at / 4 - 2, right = at % 4 - 1;
      REQUIRE(second == (2 + down) * 4 + 2 + right);
      ++offsets[{down, right}];
      // the border that came in: |down| rows and |right| columns
      const int64_t border = std::count(first, first + 20, -1.0f);
      REQUIRE(border == 20 - (5 - std::abs(down)) * (4 - std::abs(right)));
    }
  }
  REQUIRE(offsets.size() == 9);
  for (const auto& [offset, count] : offsets) {  // 66.7 each, standard deviation 7.7
    CHECK(count > 30);
    CHECK(count < 105);
  }
  // an offset beyond the image leaves the border only
  const std::vector<int64_t> one{0};
  CHECK(data::RandomShift{100, 3}(ones({1, 2, 2}), one, {}).to_vector<int>() ==
        std::vector<int>{3, 3, 3, 3});
  CHECK_THROWS_AS(data::RandomShift{1}(ones({2, 2}), one, {}), ShapeError);
}

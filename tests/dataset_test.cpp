// Datasets: what they may give and how it is made into batches, parts and transformed forms of
// them, and randomness that belongs to a sample.
#include <doctest/doctest.h>

#include <map>
#include <set>

#include <lockstep/data/loader.h>
#include <lockstep/data/random_shift.h>
#include <lockstep/data/subset.h>
#include <lockstep/data/tensor_dataset.h>
#include <lockstep/tensor/ops/join.h>

using namespace lockstep;

namespace {

using Batches = std::vector<std::vector<int64_t>>;

data::TensorDataset<1> numbers(int64_t n) { return data::TensorDataset{arange(0, n)}; }

template <class L>
Batches collect(L& loader, int64_t epoch) {
  Batches all;
  for (auto [x] : loader.epoch(epoch)) all.push_back(x.template to_vector<int64_t>());
  return all;
}

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

TEST_CASE("collate: samples become a batch field by field") {
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

TEST_CASE("collate names samples of different shapes") {
  data::Loader loader{Ragged{}, {.batch_size = 4, .workers = 1}};
  CHECK_THROWS_WITH_AS(loader.epoch(0).begin(),
                       doctest::Contains("sample 0 is [2], sample 3 is [3]; pad or crop them"),
                       ShapeError);
}

TEST_CASE("collate: samples that have no form in a batch are named") {
  CHECK_THROWS_WITH_AS(data::collate(std::vector<Tensor>{ones({1}), Tensor()}),
                       "collate: sample 1 of the batch is an undefined tensor", ValueError);
  const uint64_t largest = ~uint64_t{0} >> 1;
  CHECK(data::collate(std::vector<uint64_t>{1, largest}).to_vector<int64_t>()[1] ==
        static_cast<int64_t>(largest));
  CHECK_THROWS_WITH_AS(data::collate(std::vector<uint64_t>{1, largest + 1}),
                       doctest::Contains("sample 1 is 9223372036854775808"), ValueError);
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

TEST_CASE(
    "RandomSource: randomness of a sample depends on seed, epoch and sample, not on the worker") {
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

TEST_CASE("map: rand in the dataset, in each transform and by a sample's key all differ") {
  struct Random {
    int64_t size() const { return 4; }
    Tensor get(int64_t i, const data::RandomSource& random) const {
      return tensor<float>({rand({1}).item<float>(), data::Draws(random.key(i)).uniform()});
    }
  };
  const auto one_more = [](Tensor x) { return cat({x, rand({x.size(0), 1})}, 1); };  // x: [B, n]
  const auto drawn = [&](int workers) {
    data::Loader loader{data::map(data::map(data::map(Random{}, one_more), one_more), one_more),
                        {.batch_size = 2, .workers = workers}};
    std::vector<float> all;
    for (const Tensor& x : loader.epoch(0))
      for (float v : x.to_vector<float>()) all.push_back(v);
    return all;
  };
  const std::vector<float> all = drawn(0);
  CHECK(all.size() == 20);
  CHECK(std::set<float>(all.begin(), all.end()).size() == 20);
  CHECK(drawn(2) == all);
}

TEST_CASE("Subset is some of the samples, under their own numbers") {
  const data::Subset odd{numbers(10), std::vector<int64_t>{1, 9, 3}};
  data::Loader loader{odd, {.batch_size = 2}};
  CHECK(collect(loader, 0) == Batches{{1, 9}, {3}});
  const data::Subset middle{numbers(10), data::Range{4, 7}};
  data::Loader ranged{middle, {.batch_size = 3, .workers = 2}};
  CHECK(collect(ranged, 0) == Batches{{4, 5, 6}});
  // its draws are those that the samples have in the whole
  data::Loader whole{Noisy{}, {.batch_size = 32}};
  data::Loader part{data::Subset{Noisy{}, data::Range{5, 8}}, {.batch_size = 3}};
  for (auto [i, noise, key] : whole.epoch(1))
    for (auto [j, same_noise, same_key] : part.epoch(1)) {
      CHECK(j.template to_vector<int64_t>() == std::vector<int64_t>{5, 6, 7});
      CHECK(same_noise.template to_vector<float>() ==
            noise.narrow(0, 5, 3).template to_vector<float>());
      CHECK(same_key.template to_vector<float>() ==
            key.narrow(0, 5, 3).template to_vector<float>());
    }
  CHECK_THROWS_AS((data::Subset{numbers(10), std::vector<int64_t>{10}}), IndexError);
  CHECK_THROWS_AS((data::Subset{numbers(10), std::vector<int64_t>{-1}}), IndexError);
  CHECK_THROWS_WITH_AS((data::Subset{numbers(10), data::Range{0, 11}}),
                       "Subset: there are no samples 0 to 11 among 10", IndexError);
  CHECK_THROWS_AS((data::Subset{numbers(10), data::Range{3, 2}}), IndexError);
  const std::vector<int64_t> beyond{3};
  CHECK_THROWS_WITH_AS(middle.get(beyond, {}), "Subset: there is no sample 3 among 3", IndexError);
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

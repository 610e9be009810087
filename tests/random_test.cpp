// Random numbers: Philox against its published known answers, the distributions against their
// moments, and the promise that numbers depend on seed, offset, stream and index alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/random.h>

using namespace lockstep;
using doctest::Approx;
using doctest::Contains;

namespace {

using V = std::vector<double>;
using Block = std::array<uint32_t, 4>;
V values(const Tensor& t) { return t.to_vector<double>(); }

/// Mean of f over the values.
double mean(
    const V& v, const std::function<double(double)>& f = [](double x) { return x; }) {
  double sum = 0;
  for (double x : v) sum += f(x);
  return sum / static_cast<double>(v.size());
}
/// Runs with so many threads, then as before.
Tensor on_threads(int n, const std::function<Tensor()>& f) {
  const int before = get_num_threads();
  set_num_threads(n);
  const Tensor t = f();
  set_num_threads(before);
  return t;
}

}  // namespace

TEST_CASE("Philox 4x32-10 gives the known answers of its authors") {
  CHECK(philox({0, 0, 0, 0}, {0, 0}) == Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const uint32_t all = 0xffffffff;
  CHECK(philox({all, all, all, all}, {all, all}) ==
        Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a key's blocks use all 64 bits of seed, offset and block") {
  const RandomKey key{.seed = 0x299f31d0'a4093822, .offset = 0x03707344'13198a2e};
  CHECK(key.block(0x85a308d3'243f6a88) == Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  std::set<Block> seen;
  for (uint64_t a : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32})
    for (uint64_t b : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32})
      for (uint64_t c : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32})
        seen.insert(RandomKey{a, b}.block(c));
  CHECK(seen.size() == 27);
}

TEST_CASE("uniform bits map to [0, 1) in steps of 2^-24") {
  CHECK(RandomKey::uniform(0) == 0.0f);
  CHECK(RandomKey::uniform(0xff) == 0.0f);
  CHECK(RandomKey::uniform(0x100) == 0x1p-24f);
  CHECK(RandomKey::uniform(0x80000000) == 0.5f);
  CHECK(RandomKey::uniform(0xffffffff) == 1.0f - 0x1p-24f);
}

TEST_CASE("a generator's state is its seed, its stream and a count of draws") {
  Generator g({.seed = 7});
  const RandomKey first = g.next(), second = g.next();
  CHECK(g.state().offset == 2);
  CHECK(first.block(0) != second.block(0));
  Generator again({.seed = 7, .offset = 1});
  CHECK(again.next().block(5) == second.block(5));
  std::set<Block> streams;
  for (uint64_t s = 0; s < 64; ++s)
    streams.insert(GeneratorState{.seed = 7, .stream = s}.next().block(0));
  CHECK(streams.size() == 64);
}

TEST_CASE("the same seed gives the same numbers, another seed or a later draw others") {
  manual_seed(1);
  const V a = values(randn({5})), b = values(randn({5}));
  manual_seed(1);
  CHECK(values(randn({5})) == a);
  CHECK(values(randn({5})) == b);
  CHECK(a != b);
  manual_seed(2);
  CHECK(values(randn({5})) != a);
}

TEST_CASE("element i does not depend on how many are drawn, nor on the shape") {
  const auto draw = [](const std::function<Tensor()>& f) {
    manual_seed(3);
    return values(f());
  };
  for (int64_t n : {1, 2, 3, 5, 8}) {
    const auto begins = [n](const V& longer, const V& shorter) {
      return static_cast<int64_t>(shorter.size()) == n &&
             std::equal(shorter.begin(), shorter.end(), longer.begin());
    };
    CHECK(begins(draw([] { return rand({12}); }), draw([n] { return rand({n}); })));
    CHECK(begins(draw([] { return randn({12}); }), draw([n] { return randn({n}); })));
    CHECK(begins(draw([] { return randint(0, 1000, {12}); }),
                 draw([n] { return randint(0, 1000, {n}); })));
  }
  CHECK(draw([] { return randn({12}); }) == draw([] { return randn({3, 4}); }));
}

TEST_CASE("numbers do not depend on the number of threads") {
  const Shape shape{3, 100001};  // several blocks of work, and odd
  for (auto make :
       {+[](const Shape& s) { return rand(s); }, +[](const Shape& s) { return randn(s); },
        +[](const Shape& s) { return randint(-5, 5, s); }}) {
    const auto run = [&](int threads) {
      return on_threads(threads, [&] {
        manual_seed(4);
        return make(shape);
      });
    };
    const V one = values(run(1));
    CHECK((values(run(2)) == one));
    CHECK((values(run(5)) == one));
  }
}

TEST_CASE("each thread has a generator of its own") {
  manual_seed(5);
  const V here = values(rand({4}));
  V there, there_later;
  std::thread([&] {
    manual_seed(5);
    there = values(rand({4}));
    there_later = values(rand({4}));
  }).join();
  CHECK(there == here);
  CHECK(values(rand({4})) == there_later);  // the other thread's draws moved nothing here
}

TEST_CASE("rand is uniform in [0, 1)") {
  manual_seed(6);
  const V v = values(rand({200000}));
  CHECK(*std::min_element(v.begin(), v.end()) >= 0);
  CHECK(*std::max_element(v.begin(), v.end()) < 1);
  // Five standard errors: sqrt(1/12 / n) of the mean, and so on.
  CHECK(std::fabs(mean(v) - 0.5) < 0.0033);
  CHECK(std::fabs(mean(v, [](double x) { return x * x; }) - 1.0 / 3) < 0.0034);
  std::vector<int> bins(20);
  for (double x : v) ++bins[static_cast<size_t>(x * 20)];
  double chi = 0;
  for (int b : bins) chi += (b - 10000.0) * (b - 10000.0) / 10000.0;
  CHECK(chi < 50);  // 19 degrees of freedom: passed by all but 1 in 10,000
}

TEST_CASE("randn is normal: moments, tails, and neighbours without correlation") {
  for (DType dtype : {DType::f32, DType::f64}) {
    manual_seed(7);
    const V v = values(randn({200000}, {.dtype = dtype}));
    CHECK(std::fabs(mean(v)) < 0.0112);
    CHECK(std::fabs(mean(v, [](double x) { return x * x; }) - 1) < 0.0158);
    CHECK(std::fabs(mean(v, [](double x) { return x * x * x; })) < 0.0433);
    CHECK(std::fabs(mean(v, [](double x) { return x * x * x * x; }) - 3) < 0.11);
    CHECK(mean(v, [](double x) { return std::fabs(x) < 1; }) == Approx(0.682689).epsilon(0.01));
    CHECK(mean(v, [](double x) { return std::fabs(x) > 3; }) == Approx(0.0026998).epsilon(0.25));
    for (size_t lag : {1, 2, 3, 4}) {
      double product = 0;
      for (size_t i = 0; i + lag < v.size(); ++i) product += v[i] * v[i + lag];
      CHECK(std::fabs(product / static_cast<double>(v.size())) < 0.0112);
    }
    CHECK(std::all_of(v.begin(), v.end(), [](double x) { return std::isfinite(x); }));
  }
}

TEST_CASE("randint gives each of [low, high) its share, in the dtype asked for") {
  manual_seed(8);
  const Tensor t = randint(-2, 5, {70000});
  CHECK(t.dtype() == DType::i64);
  std::vector<int> bins(7);
  const auto v = t.to_vector<int64_t>();
  REQUIRE(*std::min_element(v.begin(), v.end()) == -2);
  REQUIRE(*std::max_element(v.begin(), v.end()) == 4);
  for (int64_t x : v) ++bins[static_cast<size_t>(x + 2)];
  double chi = 0;
  for (int b : bins) chi += (b - 10000.0) * (b - 10000.0) / 10000.0;
  CHECK(chi < 28);  // 6 degrees of freedom
  CHECK(randint(3, 4, {2}).to_vector<int>() == std::vector<int>{3, 3});
  CHECK(randint(0, 256, {100}, {.dtype = DType::u8}).dtype() == DType::u8);
  CHECK(randint(0, 9, {2}, {.dtype = DType::f32}).dtype() == DType::f32);
  CHECK_THROWS_WITH_AS(randint(3, 3, {1}), Contains("low 3 must be below high 3"), ValueError);
}

TEST_CASE("randint over ranges of up to 2^64: in bounds, even, all bits in use") {
  manual_seed(21);
  const int64_t least = INT64_MIN, most = INT64_MAX, half = int64_t{1} << 62;
  struct Range {
    int64_t low, high;
  };
  for (const auto& [low, high] :
       {Range{least, most}, {-half, half}, {-1, most}, {0, most}, {0, int64_t{1} << 33},
        {5, (int64_t{1} << 32) + 5}, {-7, (int64_t{1} << 32) - 6}, {0, half + half / 2}}) {
    const auto& shown_low = low;  // clang 14 captures no structured binding
    CAPTURE(shown_low);
    const auto& shown_high = high;  // clang 14 captures no structured binding
    CAPTURE(shown_high);
    constexpr int n = 40000;
    const auto v = randint(low, high, {n}).to_vector<int64_t>();
    REQUIRE(*std::min_element(v.begin(), v.end()) >= low);
    REQUIRE(*std::max_element(v.begin(), v.end()) < high);
    // The share of each sixteenth of the range, and of ones in each low bit.
    const long double width = static_cast<long double>(high) - low;
    std::vector<int> bins(16), ones(32);
    for (int64_t x : v) {
      ++bins[static_cast<size_t>((static_cast<long double>(x) - low) / width * 16)];
      for (size_t bit = 0; bit < ones.size(); ++bit) ones[bit] += x >> bit & 1;
    }
    double chi = 0;
    for (int b : bins) chi += (b - n / 16.0) * (b - n / 16.0) / (n / 16.0);
    CHECK(chi < 45);  // 15 degrees of freedom
    for (int count : ones) CHECK(std::abs(count - n / 2) < 500);  // five standard deviations
  }
  // A range of 3/4 of 2^32: without rejection some numbers would be twice as likely as others.
  const int64_t range = int64_t{3} << 30;
  std::array<int, 3> thirds{};
  for (int64_t x : randint(0, range, {60000}).to_vector<int64_t>()) ++thirds[size_t(x % 3)];
  for (int count : thirds) CHECK(std::abs(count - 20000) < 600);
  CHECK_THROWS_AS(randint(0, (int64_t{1} << 24) + 2, {1}, {.dtype = DType::f32}), ValueError);
  CHECK_THROWS_AS(randint(0, 257, {1}, {.dtype = DType::u8}), ValueError);
  CHECK_THROWS_AS(randint(most, least, {1}), ValueError);
}

TEST_CASE("rand uses all bits that its dtype holds, and never gives 1") {
  struct Bits {
    DType dtype;
    int digits;
  };
  for (const auto& [dtype, digits] :
       {Bits{DType::f64, 53}, {DType::f32, 24}, {DType::f16, 11}, {DType::bf16, 8}}) {
    const auto& shown_dtype = dtype;  // clang 14 captures no structured binding
    CAPTURE(shown_dtype);
    manual_seed(22);
    const V v = values(rand({100000}, {.dtype = dtype}));
    CHECK(*std::max_element(v.begin(), v.end()) < 1);
    std::vector<int> ones(static_cast<size_t>(digits));
    for (double x : v) {
      const double whole = std::ldexp(x, digits);
      REQUIRE(whole == std::floor(whole));
      for (int bit = 0; bit < digits; ++bit)
        ones[static_cast<size_t>(bit)] += static_cast<uint64_t>(whole) >> bit & 1;
    }
    for (int count : ones) CHECK(std::abs(count - 50000) < 800);
  }
}

TEST_CASE("new threads draw different numbers; the main thread's seed decides which") {
  const auto drawn = [] {
    manual_seed(31);
    std::vector<V> all{values(rand({8}))};
    for (int i = 0; i < 3; ++i)
      std::thread([&] { all.push_back(values(rand({8}))); }).join();
    return all;
  };
  const std::vector<V> first = drawn(), again = drawn();
  CHECK(first == again);
  CHECK(std::set<V>(first.begin(), first.end()).size() == 4);
}

TEST_CASE("rand and randn make floats, and leaves where asked") {
  CHECK(rand({2}).dtype() == DType::f32);
  CHECK(rand({2}, {.dtype = DType::f64, .requires_grad = true}).requires_grad());
  CHECK(randn({2}, {.requires_grad = true}).is_leaf());
  CHECK(randn({0}).numel() == 0);
  CHECK(randn({}).dim() == 0);
  CHECK_THROWS_WITH_AS(rand({2}, {.dtype = DType::i64}), Contains("i64"), DTypeError);
  CHECK_THROWS_AS(randn({2}, {.dtype = DType::i32}), DTypeError);
}

TEST_CASE("a random permutation is one, depends on the key alone, and on all of it") {
  const auto p = random_permutation(1000, {.seed = 1, .offset = 2});
  std::vector<int64_t> sorted = p, identity(1000);
  std::sort(sorted.begin(), sorted.end());
  std::iota(identity.begin(), identity.end(), 0);
  CHECK(sorted == identity);
  CHECK(p != identity);
  CHECK(random_permutation(1000, {.seed = 1, .offset = 2}) == p);
  CHECK(random_permutation(1000, {.seed = 2, .offset = 2}) != p);
  CHECK(random_permutation(1000, {.seed = 1, .offset = 3}) != p);
  CHECK(random_permutation(0, {}).empty());
  CHECK(random_permutation(1, {}) == std::vector<int64_t>{0});
  CHECK_THROWS_AS(random_permutation(-1, {}), ValueError);
}

TEST_CASE("every order of three is equally likely") {
  std::vector<int> seen(27);
  for (uint64_t seed = 0; seed < 6000; ++seed) {
    const auto p = random_permutation(3, {.seed = seed});
    ++seen[static_cast<size_t>(p[0] * 9 + p[1] * 3 + p[2])];
  }
  int orders = 0;
  for (int n : seen) {
    if (n == 0) continue;
    ++orders;
    CHECK(std::abs(n - 1000) < 150);  // five standard deviations
  }
  CHECK(orders == 6);
}

TEST_CASE("randint: requires_grad holds for floating dtypes, and is refused for integers") {
  CHECK(randint(0, 5, {3}, {.dtype = DType::f32, .requires_grad = true}).requires_grad());
  CHECK_THROWS_AS(randint(0, 5, {3}, {.dtype = DType::i64, .requires_grad = true}), Error);
}

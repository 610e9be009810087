// The comm hooks without state, called as DistributedDataParallel calls them: what they make of a
// bucket, to the last bit, and what travels.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include <lockstep/distributed/comm_hooks.h>
#include <lockstep/distributed/local.h>
#include <lockstep/tensor/half.h>

#include "wrapped_group.h"

using namespace lockstep;
using namespace lockstep::dist;

namespace {

constexpr LocalOptions kSoon{.timeout = std::chrono::seconds(60)};

GradBucket bucket_of(const Tensor& buffer, ProcessGroup& group) {
  GradBucket bucket;
  bucket.is_last = true;
  bucket.buffer = buffer;
  bucket.gradients = {buffer};
  bucket.parameters = {zeros(buffer.shape(), {.dtype = buffer.dtype()})};
  bucket.group = &group;
  return bucket;
}

/// Rank r's gradients: many magnitudes, different on every rank.
std::vector<float> gradients(int rank, size_t n) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  std::normal_distribution<float> normal;
  std::vector<float> g(n);
  for (size_t i = 0; i < n; ++i) g[i] = std::ldexp(normal(random), static_cast<int>(i % 37) - 26);
  return g;
}

/// Half of the distance between two neighbours of the format at x.
double half_ulp(double x, int fraction_bits, int lowest_exponent) {
  const int exponent = x == 0 ? lowest_exponent : std::max(std::ilogb(x), lowest_exponent);
  return std::ldexp(0.5, exponent - fraction_bits);
}

struct Wire : WrappedGroup {
  using WrappedGroup::WrappedGroup;
  WorkPtr start(Collective call) override {
    bytes += static_cast<size_t>(call.model().numel()) * size_of(call.model().dtype());
    text += call.text() + ";";
    return inner_->start(std::move(call));
  }
  size_t bytes = 0;
  std::string text;
};

}  // namespace

TEST_CASE("all_reduce averages as it is") {
  for (DType t : {DType::f32, DType::f64})
    run_local(
        3,
        [&](Group group) {
          const double r = group.rank();
          const Tensor g = tensor(std::vector<double>{3 * r, -6, r * r}).to(t);
          GradBucket bucket = bucket_of(g, group.process_group());
          hooks::all_reduce()(bucket)->wait();
          CHECK(g[0].item<double>() == doctest::Approx(3));
          CHECK(g[1].item<double>() == doctest::Approx(-6));
          CHECK(g[2].item<double>() == doctest::Approx(5.0 / 3));
        },
        kSoon);
}

TEST_CASE("compression: the mean within the rounding of each part and of the whole") {
  struct Format {
    CommHook hook;
    int fraction_bits, lowest_exponent;
  };
  constexpr size_t kCount = 5000;
  for (const Format& format :
       {Format{hooks::fp16_compress(), 10, -14}, Format{hooks::bf16_compress(), 7, -126}})
    for (int ranks : {1, 2, 3, 4}) {
      CAPTURE(ranks);
      run_local(
          ranks,
          [&](Group group) {
            Tensor g = tensor(gradients(group.rank(), kCount));
            GradBucket bucket = bucket_of(g, group.process_group());
            format.hook(bucket)->wait();
            CHECK(g.dtype() == DType::f32);
            const auto got = g.to_vector<double>();
            std::vector<std::vector<float>> all;
            for (int r = 0; r < ranks; ++r) all.push_back(gradients(r, kCount));
            int wrong = 0, exact = 0;
            for (size_t i = 0; i < kCount; ++i) {
              double mean = 0, bound = 0;
              for (const auto& theirs : all) {
                const double part = static_cast<double>(theirs[i]) / ranks;
                mean += part;
                bound += half_ulp(part, format.fraction_bits, format.lowest_exponent);
                bound += std::abs(part) * 0x1p-22;  // the division and the sum in f32
              }
              bound += half_ulp(mean, format.fraction_bits, format.lowest_exponent);
              // The mean that was rounded may lie in the binade above the true one.
              wrong += std::abs(got[i] - mean) > bound &&
                       std::abs(got[i] - mean) >
                           bound - half_ulp(mean, format.fraction_bits, format.lowest_exponent) +
                               half_ulp(got[i], format.fraction_bits, format.lowest_exponent);
              exact += got[i] == mean;
            }
            CHECK(wrong == 0);
            CHECK(exact < static_cast<int>(kCount) / 2);  // it was rounded
          },
          kSoon);
    }
}

TEST_CASE("compression divides before it adds: 4 x 30000 does not overflow f16") {
  run_local(
      4,
      [](Group group) {
        Tensor g = full({100}, 30000);
        GradBucket bucket = bucket_of(g, group.process_group());
        hooks::fp16_compress()(bucket)->wait();
        CHECK(g.to_vector<float>() == std::vector<float>(100, 30000.0f));
        // Beyond f16, but not its quarter.
        g.fill_(100000);
        hooks::fp16_compress()(bucket)->wait();
        CHECK(std::isinf(g[0].item<float>()));  // the mean itself is
        g.fill_(group.rank() == 0 ? 200000 : 0);
        hooks::fp16_compress()(bucket)->wait();
        CHECK(g[0].item<float>() == 50000.0f - 16);  // f16 has multiples of 32 there: 49984
        g.fill_(1e30);
        hooks::bf16_compress()(bucket)->wait();
        CHECK(g[0].item<double>() == doctest::Approx(1e30).epsilon(1.0 / 256));
      },
      kSoon);
}

TEST_CASE("the wire carries two bytes per element") {
  run_local(
      2,
      [](Group group) {
        Wire wire(group.shared());
        Tensor g = tensor(gradients(group.rank(), 1000));
        GradBucket bucket = bucket_of(g, wire);
        hooks::fp16_compress()(bucket)->wait();
        CHECK(wire.bytes == 2000);
        CHECK(wire.text == "all_reduce(sum) of f16 [1000];");
        hooks::bf16_compress()(bucket)->wait();
        CHECK(wire.bytes == 4000);
        hooks::all_reduce()(bucket)->wait();
        CHECK(wire.bytes == 8000);
        CHECK(wire.text.ends_with("bf16 [1000];all_reduce(avg) of f32 [1000];"));
        // f64 gradients fit too, and an empty bucket.
        Tensor wide = full({3}, 1.0 + group.rank(), {.dtype = DType::f64});
        GradBucket second = bucket_of(wide, wire);
        hooks::fp16_compress()(second)->wait();
        CHECK(wide.to_vector<double>() == std::vector<double>{1.5, 1.5, 1.5});
        GradBucket none = bucket_of(zeros({0}), wire);
        hooks::fp16_compress()(none)->wait();
      },
      kSoon);
}

TEST_CASE("NaN and infinity arrive on every rank") {
  run_local(
      2,
      [](Group group) {
        for (const CommHook& hook : {hooks::fp16_compress(), hooks::bf16_compress()}) {
          Tensor g = ones({2});
          if (group.rank() == 1) g[0].fill_(NAN), g[1].fill_(INFINITY);
          GradBucket bucket = bucket_of(g, group.process_group());
          hook(bucket)->wait();
          CHECK(std::isnan(g[0].item<float>()));
          CHECK(g[1].item<float>() == INFINITY);
        }
      },
      kSoon);
}

TEST_CASE("several buckets under way are waited for in order") {
  run_local(
      3,
      [](Group group) {
        std::vector<GradBucket> buckets;
        std::vector<WorkPtr> works;
        for (int i = 0; i < 4; ++i)
          buckets.push_back(bucket_of(full({10}, i + group.rank()), group.process_group()));
        for (GradBucket& b : buckets) works.push_back(hooks::fp16_compress()(b));
        for (const WorkPtr& w : works) w->wait();
        for (int i = 0; i < 4; ++i)
          CHECK(buckets[static_cast<size_t>(i)].buffer[9].item<float>() ==
                doctest::Approx(i + 1).epsilon(0x1p-10));
      },
      kSoon);
}

// Two-byte floats on the way between ranks: gradients are divided before they are added, so that nothing
// overflows that one process could hold; compression really halves what travels, and gives f32 back within
// the rounding that it must do. Expected numbers are exact, or bounded by halves of units in the last place.
#include "cases.h"

#include <lockstep/distributed/comm_hooks.h>

namespace {

using namespace cases;

/// 30000 on each rank: the sum of three or more would be infinite.
void half_mean(Group g) {
  for (const int64_t n : {1, 7, 1000}) {
    std::vector<uint16_t> bits(static_cast<size_t>(n), 0x7753);
    const Tensor t = from_blob(bits.data(), {n}, {.dtype = DType::f16});
    g.all_reduce(t, dist::ReduceOp::avg);
    for (const uint16_t b : bits)
      require(b == 0x7753, str_cat("the mean of 30000 has the bits ", b));
    // 1 + 2 r 2^-10, whose mean is 1 + (W - 1) 2^-10; where parts are rounded it may be one bit off.
    for (auto& b : bits) b = static_cast<uint16_t>(0x3C00 + 2 * g.rank());
    g.all_reduce(t, dist::ReduceOp::avg);
    for (const uint16_t b : bits)
      require(std::abs(b - (0x3C00 + g.size() - 1)) <= (g.backend() == "gloo"),
              str_cat("the mean of 1 .. has the bits ", b));
  }
}

struct HalfWeight : nn::Module {
  nn::Parameter w{full({5}, 2).to(DType::f16)}, v{full({3}, 2)};
  Tensor forward(double x) { return (w.to(DType::f32) * x).sum() + (v * x).sum(); }
  LOCKSTEP_MODULE(HalfWeight, w, v)
};

void half_parameter(Group g) {
  for (const bool find : {false, true})
    for (const auto& options : layouts({.find_unused_parameters = find})) {
      DistributedDataParallel net{HalfWeight{}, g, options};
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        net(30000).backward();
        const Tensor grad = net.module().w.grad();
        require(grad.dtype() == DType::f16, "the gradient's dtype");
        for (const double v : grad.to(DType::f64).to_vector<double>())
          require(v == 30000, str_cat("the mean of 30000 is ", v));
        same_bits(g, grad.to(DType::f64), "w.grad");
        // Ranks that differ: 1024, 2048, ... are exact, and so is their mean for two and four.
        net.zero_grad();
        net(1024.0 * (g.rank() + 1)).backward();
        for (const double v : net.module().w.grad().to(DType::f64).to_vector<double>())
          require(v == 512.0 * (g.size() + 1), str_cat("the mean of 1024 .. is ", v));
      }
    }
}

struct Weights : nn::Module {
  nn::Parameter w{ones({1000})};
  Tensor forward(const Tensor& x) { return (w * x).sum(); }
  LOCKSTEP_MODULE(Weights, w)
};

void compression_does_not_overflow(Group g) {
  const double large = 0x1p126;  // whose sum over four ranks f32 and bf16 cannot hold
  for (const bool bf16 : {false, true})
    for (auto options : layouts()) {
      options.comm_hook = bf16 ? dist::hooks::bf16_compress() : dist::hooks::fp16_compress();
      DistributedDataParallel net{Weights{}, g, options};
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        net(full({1000}, bf16 ? large : 30000)).backward();
        for (const double v : net.module().w.grad().to_vector<double>())
          require(v == (bf16 ? large : 30000), str_cat("the mean is ", v));
      }
    }
}

/// A unit in the last place of v as f16 (10 fraction bits, least 2^-24) or bf16 (7).
double ulp(double v, bool bf16) {
  int exponent = -1000;
  if (v != 0) std::frexp(v, &exponent), --exponent;
  return bf16 ? std::ldexp(1, std::max(exponent, -126) - 7)
              : std::ldexp(1, std::max(exponent, -14) - 10);
}

void compression(Group g) {
  for (const bool bf16 : {false, true})
    for (const bool local : {false, true}) {
      const auto recorder = recording(g);
      DistributedDataParallel net{
          Weights{},
          Group(recorder),
          {.comm_hook = bf16 ? dist::hooks::bf16_compress() : dist::hooks::fp16_compress()}};
      manual_seed(static_cast<uint64_t>(g.rank() + 1));
      // Magnitudes from far below f16's least normal number to some hundreds.
      const Tensor x = randn({1000}) * exp(randn({1000}) * 4.0 - 4.0);
      const Tensor all = g.all_gather(x);
      for (int step = 0; step < 3; ++step) {
        net.zero_grad();
        if (local) {
          const auto guard = net.no_sync();
          net(x).backward();
          all_near(net.module().w.grad(), x, "a local gradient", 0);
          net.zero_grad();
        }
        recorder->log().clear();
        net(x).backward();
        for (const Call& c : recorder->log()) {
          if (c.kind != dist::CollectiveKind::all_reduce || !is_floating(c.dtype)) continue;
          require(c.dtype == (bf16 ? DType::bf16 : DType::f16), "on the wire: " + c.text);
          require(c.bytes == 2000, str_cat(c.bytes, " bytes on the wire"));
        }
        require(recorder->reductions() == 1, "one reduction");
        const Tensor grad = net.module().w.grad();
        require(grad.dtype() == DType::f32, "the gradient's dtype");
        same_bits(g, grad, "w.grad");
        const auto got = grad.to_vector<double>();
        for (int64_t i = 0; i < 1000; ++i) {
          double mean = 0, bound = 0, sizes = 0;
          for (int r = 0; r < g.size(); ++r) {
            const double part = all[r][i].item<double>() / g.size();
            mean += part;
            sizes += std::abs(part);
            bound += ulp(part, bf16) / 2;
          }
          bound += ulp(mean, bf16) / 2;
          // Gloo rounds each sum on the way.
          if (g.backend() == "gloo") bound += (g.size() - 2) * ulp(sizes, bf16) / 2;
          const double off = std::abs(got[static_cast<size_t>(i)] - mean);
          require(off <= bound * (1 + 1e-6) + 1e-12 * std::abs(mean),
                  str_cat("mean ", mean, ": off by ", off, ", bound ", bound));
        }
      }
    }
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"the mean of f16 on two ranks", 2, half_mean},
      {"the mean of f16 on four ranks", 4, half_mean},
      {"an f16 parameter on two ranks", 2, half_parameter},
      {"an f16 parameter on four ranks", 4, half_parameter},
      {"compression does not overflow", 4, compression_does_not_overflow},
      {"compression halves what travels, on two ranks", 2, compression},
      {"compression halves what travels, on three ranks", 3, compression},
  };
  return list;
}

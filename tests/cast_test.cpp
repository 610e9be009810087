// f16 and bf16: conversions from and to every dtype, against rounding to nearest even done here by
// search among all values of the format; what else a tensor of them can do; and that a cast's
// gradient is the cast back.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/tensor.h>

using namespace lockstep;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kTwoByte[] = {DType::f16, DType::bf16};
constexpr DType kOthers[] = {DType::f32, DType::f64, DType::i64,
                             DType::i32, DType::i16, DType::i8, DType::u8, DType::boolean};

/// The number behind the bits, by the format's definition.
double value_of(DType t, uint16_t bits) {
  const int fraction = t == DType::f16 ? 10 : 7, exponent_bits = 15 - fraction;
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  const double sign = bits >> 15 ? -1 : 1;
  const int e = bits >> fraction & top, f = bits & ((1 << fraction) - 1);
  if (e == top) return f ? kNan : sign * kInf;
  return sign * (e == 0 ? std::ldexp(f, 1 - bias - fraction)
                        : std::ldexp((1 << fraction) + f, e - bias - fraction));
}

/// The bits nearest to the value; between two, those of the even one. Exact for every double, since
/// two neighbours and their middle are doubles too.
class Nearest {
 public:
  explicit Nearest(DType t) : t_(t), infinity_(t == DType::f16 ? 0x7C00 : 0x7F80) {
    for (int bits = 0; bits < infinity_; ++bits)
      values_.push_back(value_of(t, static_cast<uint16_t>(bits)));
    // The format's next number, if its exponent went on: what lies halfway to it is infinite.
    values_.push_back(2 * values_.back() - values_[values_.size() - 2]);
  }
  uint16_t operator()(double x) const {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double a = std::abs(x);
    if (a >= values_.back()) return static_cast<uint16_t>(sign | infinity_);
    const auto above = std::upper_bound(values_.begin(), values_.end(), a);
    const int low = static_cast<int>(above - values_.begin()) - 1;
    const double middle = (values_[static_cast<size_t>(low)] + *above) / 2;
    const bool up = a > middle || (a == middle && low % 2 == 1);
    return static_cast<uint16_t>(sign | (low + up));
  }
  /// Whether bits is what x must become; any NaN for a NaN.
  bool is(double x, uint16_t bits) const {
    return std::isnan(x) ? std::isnan(value_of(t_, bits)) : bits == (*this)(x);
  }

 private:
  DType t_;
  int infinity_;
  std::vector<double> values_;  // of the positive bits, in order
};

const uint16_t* bits_of(const Tensor& t) { return static_cast<const uint16_t*>(t.data_ptr()); }

/// Every one of the 65536 bit patterns.
Tensor all_bits(DType t) {
  Tensor x = empty({65536}, {.dtype = t});
  for (int i = 0; i < 65536; ++i)
    static_cast<uint16_t*>(x.data_ptr())[i] = static_cast<uint16_t>(i);
  return x;
}

/// Numbers that are hard to round: all values of the format and the middles between them, each with
/// its neighbours in T, and random bits.
template <class T>
std::vector<T> hard_numbers(DType t) {
  std::vector<T> x{T(0),
                   -T(0),
                   T(kInf),
                   -T(kInf),
                   T(kNan),
                   std::numeric_limits<T>::max(),
                   std::numeric_limits<T>::denorm_min(),
                   std::numeric_limits<T>::min()};
  const int infinity = t == DType::f16 ? 0x7C00 : 0x7F80;
  for (int bits = 0; bits < infinity; ++bits) {
    const double v = value_of(t, static_cast<uint16_t>(bits));
    const double next = bits + 1 < infinity ? value_of(t, static_cast<uint16_t>(bits + 1))
                                            : 2 * v - value_of(t, static_cast<uint16_t>(bits - 1));
    for (const double exact : {v, v + (next - v) / 2}) {
      const T at = static_cast<T>(exact);
      for (const T near : {at, std::nextafter(at, T(kInf)), std::nextafter(at, T(0))}) {
        x.push_back(near);
        x.push_back(-near);
      }
    }
  }
  std::mt19937_64 random(7);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t bits = random();
    T v;
    std::memcpy(&v, &bits, sizeof v);
    x.push_back(v);
    x.push_back(static_cast<T>(
        std::ldexp(static_cast<double>(bits >> 11) * 0x1p-53, static_cast<int>(bits % 48) - 30)));
  }
  return x;
}

template <class T>
void check_rounding(DType t) {
  const Nearest nearest(t);
  const std::vector<T> x = hard_numbers<T>(t);
  const Tensor y = tensor(x).to(t);
  int64_t wrong = 0;
  for (size_t i = 0; i < x.size(); ++i)
    wrong += !nearest.is(static_cast<double>(x[i]), bits_of(y)[i]);
  CHECK(wrong == 0);
  // One by one through strides: other code than that for dense rows.
  Tensor apart = empty({static_cast<int64_t>(x.size()), 2}, {.dtype = t}).zero_();
  apart.select(1, 1).copy_(tensor(x));
  wrong = 0;
  for (size_t i = 0; i < x.size(); ++i)
    wrong += !nearest.is(static_cast<double>(x[i]), bits_of(apart)[2 * i + 1]) ||
             bits_of(apart)[2 * i] != 0;
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("to(f32) and to(f64) of all 65536 values of f16 and bf16 are exact, and back") {
  for (DType t : kTwoByte)
    for (DType wide : {DType::f32, DType::f64}) {
      const Tensor x = all_bits(t), y = x.to(wide), back = y.to(t);
      const auto values = y.to_vector<double>();
      int wrong = 0;
      for (int i = 0; i < 65536; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        const double want = value_of(t, bits), got = values[static_cast<size_t>(i)];
        if (std::isnan(want))
          wrong += !std::isnan(got) || !std::isnan(value_of(t, bits_of(back)[i])) ||
                   bits_of(back)[i] >> 15 != bits >> 15;
        else
          wrong +=
              got != want || std::signbit(got) != std::signbit(want) || bits_of(back)[i] != bits;
      }
      CHECK(wrong == 0);
    }
}

TEST_CASE("to(f16) and to(bf16) of f32 and f64 round to nearest even, once") {
  for (DType t : kTwoByte) {
    check_rounding<float>(t);
    check_rounding<double>(t);
  }
  // Rounded to f32 on the way this would become the tie 1 + 2^-11, and that 1.
  CHECK(scalar(1 + 0x1p-11 + 0x1p-40, {.dtype = DType::f16}).item<double>() == 1 + 0x1p-10);
  CHECK(scalar(1 + 0x1p-11, {.dtype = DType::f16}).item<double>() == 1);
  CHECK(scalar(65519.999, {.dtype = DType::f16}).item<double>() == 65504);
  CHECK(scalar(65520, {.dtype = DType::f16}).item<double>() == kInf);
  CHECK(scalar(0x1p-25, {.dtype = DType::f16}).item<double>() == 0);
  CHECK(scalar(-0x1.8p-25, {.dtype = DType::f16}).item<double>() == -0x1p-24);
}

TEST_CASE("to(f16) and to(bf16) of integers round once, however large") {
  std::mt19937_64 random(3);
  std::vector<int64_t> x{0,
                         1,
                         -1,
                         255,
                         256,
                         257,
                         2049,
                         -2051,
                         65519,
                         65520,
                         -65520,
                         INT64_MAX,
                         INT64_MIN,
                         (int64_t{1} << 62) + (int64_t{1} << 54) + 1,
                         (int64_t{1} << 62) + (int64_t{1} << 54),
                         -(int64_t{1} << 40) - (int64_t{1} << 32) - 1};
  for (int i = 0; i < 20000; ++i) {
    const auto v = static_cast<int64_t>(random());
    x.push_back(v >> (i % 64));
    // Beside a tie of bf16: 9 bits, the last one set, and a little more or less.
    const int shift = i % 54;
    const int64_t tie = ((v & 0xFF) | 0x100) * 2 + 1;
    if (shift < 53) x.push_back((tie << shift) + (i % 3 - 1));
  }
  for (DType t : kTwoByte) {
    const Tensor y = tensor(x).to(t);
    int wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      // 64-bit integers are exact in x86's long double alone, so the search is done in integers:
      // what is nearer, the value below or above, and where neither the even one.
      const auto bits = bits_of(y)[i];
      const double got = value_of(t, bits);
      if (t == DType::f16 && std::abs(static_cast<double>(x[i])) >= 65520) {
        wrong += std::abs(got) != kInf || std::signbit(got) != (x[i] < 0);
        continue;
      }
      const uint64_t a = x[i] < 0 ? 0 - static_cast<uint64_t>(x[i]) : static_cast<uint64_t>(x[i]);
      const int kept = t == DType::f16 ? 11 : 8;
      int drop = 0;
      while (a >> drop >> kept) ++drop;
      uint64_t m = a >> drop;
      const uint64_t rest = drop ? a & ((uint64_t{1} << drop) - 1) : 0,
                     half = drop ? uint64_t{1} << (drop - 1) : 1;
      m += rest > half || (rest == half && m % 2 == 1);
      wrong += got != std::ldexp(static_cast<double>(m), drop) * (x[i] < 0 ? -1 : 1);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("to() between every dtype and f16 or bf16") {
  for (DType t : kTwoByte) {
    const Tensor x = tensor(std::vector<double>{0, -0.0, 1, 2.75, 100, 200.5}).to(t);
    for (DType other : kOthers) {
      const Tensor y = x.to(other);
      CHECK(y.dtype() == other);
      std::vector<double> want = x.to_vector<double>();
      for (double& v : want)
        v = other == DType::boolean ? v != 0
            : is_floating(other)    ? v
            : other == DType::i8    ? std::min(std::trunc(v), 127.0)
                                    : std::trunc(v);
      CHECK(y.to_vector<double>() == want);
      CHECK(y.to(t).to_vector<double>() == want);
    }
    CHECK(tensor(std::vector<double>{-1.5}).to(t).to(DType::u8).item<int>() == 255);
    CHECK(scalar(kNan, {.dtype = t}).to(DType::boolean).item<bool>());
  }
  const Tensor half = tensor(std::vector<double>{1 + 0x1p-10, 65504, 0x1p-24}).to(DType::f16);
  CHECK(half.to(DType::bf16).to_vector<double>() == std::vector<double>{1, 65536, 0x1p-24});
  const Tensor brain = tensor(std::vector<double>{1 + 0x1p-7, 0x1p100, 0x1p-26}).to(DType::bf16);
  CHECK(brain.to(DType::f16).to_vector<double>() == std::vector<double>{1 + 0x1p-7, kInf, 0});
}

namespace {

/// What a float becomes as an integer: computed in integers of 128 bits.
template <class To>
int64_t expected_integer(double v) {
  using L = std::numeric_limits<To>;
  if (std::isnan(v)) return 0;
  if constexpr (std::is_same_v<To, bool>) return v != 0;
  if constexpr (std::is_same_v<To, uint8_t>)
    return static_cast<uint8_t>(expected_integer<int64_t>(v));
  const double cut = std::trunc(std::clamp(v, -0x1p100, 0x1p100));
  const __int128 whole = static_cast<__int128>(cut);
  return static_cast<int64_t>(std::clamp<__int128>(whole, L::min(), L::max()));
}

template <class To>
void check_integers(const Tensor& x) {
  const std::vector<double> from = x.to_vector<double>();
  const DType t = dtype_of<To>();
  Tensor apart = zeros({x.numel(), 2}, {.dtype = t});
  apart.select(1, 1).copy_(x);
  const std::vector<int64_t> dense = x.to(t).to_vector<int64_t>(),
                             strided = apart.select(1, 1).to_vector<int64_t>();
  for (size_t i = 0; i < from.size(); ++i) {
    // A bool of NaN is true, since it differs from 0.
    const bool nan = std::is_same_v<To, bool> && std::isnan(from[i]);
    const int64_t want = nan ? 1 : expected_integer<To>(from[i]);
    INFO(name_of(x.dtype()), " ", from[i], " to ", name_of(t));
    CHECK(dense[i] == want);
    CHECK(strided[i] == want);
    const auto at = static_cast<int64_t>(i);
    CHECK(static_cast<int64_t>(x[at].item<To>()) == want);
    CHECK(static_cast<int64_t>(x[at].to_vector<To>()[0]) == want);
    CHECK(tensor(std::vector<double>{from[i]}, {1}, {.dtype = t}).item<int64_t>() == want);
    if (i == 0) CHECK(full({1}, from[i], {.dtype = t}).item<int64_t>() == want);
  }
}

}  // namespace

TEST_CASE("to() of floats to integers is defined for every value") {
  std::vector<double> v{0.0,
                        -0.0,
                        0.9,
                        -0.9,
                        1.5,
                        -1.5,
                        254.9,
                        255,
                        256.5,
                        -1,
                        -255.5,
                        3e9,
                        -3e9,
                        1e10,
                        -1e10,
                        1e19,
                        -1e19,
                        1e30,
                        -1e30,
                        1e300,
                        -1e300,
                        0x1p31,
                        -0x1p31,
                        0x1p31 - 1,
                        -0x1p31 - 1,
                        0x1p63,
                        -0x1p63,
                        0x1p62,
                        0x1.fffffffffffffp62,
                        0x1.fffffep30,
                        0x1.fffffep62,
                        kInf,
                        -kInf,
                        kNan,
                        -kNan,
                        1e-300,
                        5e-324};
  for (size_t rotation = 0; rotation < v.size(); ++rotation) {  // fill_ takes each first element
    std::rotate(v.begin(), v.begin() + 1, v.end());
    for (DType t : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      if (rotation && t != DType::f64) continue;
      const Tensor x = tensor(v).to(t);
      check_integers<int64_t>(x);
      check_integers<int32_t>(x);
      check_integers<uint8_t>(x);
      check_integers<bool>(x);
    }
  }
}

TEST_CASE("to() of integers to narrower ones keeps the low bits, to floats rounds once") {
  const int64_t big = (int64_t{1} << 53) + 1;
  const Tensor x = tensor(std::vector<int64_t>{big, -1, 256, (1 << 24) + 1, INT64_MIN});
  CHECK(x.to(DType::i32).to_vector<int64_t>() ==
        std::vector<int64_t>{1, -1, 256, (1 << 24) + 1, 0});
  CHECK(x.to(DType::u8).to_vector<int64_t>() == std::vector<int64_t>{1, 255, 0, 1, 0});
  CHECK(x.to(DType::boolean).to_vector<int64_t>() == std::vector<int64_t>{1, 1, 1, 1, 1});
  CHECK(x.to(DType::f64).to_vector<double>() ==
        std::vector<double>{0x1p53, -1, 256, 0x1p24 + 1, -0x1p63});
  CHECK(x.to(DType::f32).to_vector<double>() ==
        std::vector<double>{0x1p53, -1, 256, 0x1p24, -0x1p63});
}

TEST_CASE("to(f16) and to(bf16) of NaN keep the sign and the upper bits of the payload") {
  for (uint32_t pattern : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFABE000u, 0x7FA00000u}) {
    const float v = std::bit_cast<float>(pattern);
    const Tensor x = tensor(std::vector<float>{v});
    const uint16_t half = *bits_of(x.to(DType::f16)), brain = *bits_of(x.to(DType::bf16));
    const auto sign = static_cast<uint16_t>(pattern >> 16 & 0x8000);
    CHECK(half == (sign | 0x7E00 | (pattern >> 13 & 0x1FF)));
    CHECK(brain == (sign | 0x7FC0 | (pattern >> 16 & 0x3F)));
  }
}

TEST_CASE("item and to_vector convert to C++'s other integers by the same rules") {
  const Tensor x = tensor(std::vector<double>{kInf, -kInf, kNan, -1, 1e10, -0.5, 0x1p63});
  CHECK(x.to_vector<uint64_t>() ==
        std::vector<uint64_t>{UINT64_MAX, 0, 0, 0, 10000000000, 0, uint64_t{1} << 63});
  CHECK(x.to_vector<int16_t>() ==
        std::vector<int16_t>{INT16_MAX, INT16_MIN, 0, -1, INT16_MAX, 0, INT16_MAX});
  CHECK(x[0].item<int16_t>() == INT16_MAX);
  CHECK(x[4].item<uint32_t>() == UINT32_MAX);
  CHECK(scalar(0.5).item<bool>());
  CHECK(full({1}, -1, {.dtype = DType::i64}).item<uint64_t>() == UINT64_MAX);
  const std::vector<uint64_t> large{UINT64_MAX, uint64_t{1} << 63, (uint64_t{1} << 63) + 1};
  CHECK(tensor(large, {3}, {.dtype = DType::bf16}).to_vector<double>() ==
        std::vector<double>{0x1p64, 0x1p63, 0x1p63});
}

TEST_CASE("strided, channels-last, broadcast, empty and 0-d tensors") {
  for (DType t : kTwoByte) {
    const Tensor x = arange(0, 120).to(DType::f32).view({2, 3, 4, 5});
    const auto same = [&](const Tensor& y, const Tensor& z) {
      return y.shape() == z.shape() && y.to_vector<double>() == z.to_vector<double>();
    };
    CHECK(same(x.permute({0, 2, 3, 1}).to(t), x.permute({0, 2, 3, 1})));
    CHECK(same(x.to(t).permute({3, 1, 0, 2}).contiguous(), x.permute({3, 1, 0, 2})));
    const Tensor last = empty_strided({2, 3, 4, 5}, {60, 1, 15, 3});
    Tensor(last).copy_(x);
    CHECK(last.to(t).is_channels_last());
    CHECK(same(last.to(t), x));
    CHECK(same(x.slice(3, {.start = 1, .step = 2}).to(t).to(DType::f32),
               x.slice(3, {.start = 1, .step = 2})));
    Tensor wide = zeros({3, 4}, {.dtype = t});
    wide.copy_(tensor(std::vector<float>{1.5f, 2, 3, 4}));
    CHECK(wide.to_vector<double>() ==
          std::vector<double>{1.5, 2, 3, 4, 1.5, 2, 3, 4, 1.5, 2, 3, 4});
    Tensor from_half = zeros({2, 2});
    from_half.copy_(tensor(std::vector<float>{7, 8}).to(t).unsqueeze(1));
    CHECK(from_half.to_vector<double>() == std::vector<double>{7, 7, 8, 8});
    CHECK(empty({0, 3}).to(t).to(DType::f64).shape() == Shape{0, 3});
    CHECK(scalar(2.5).to(t).to(DType::f64).item<double>() == 2.5);
    const int threads = get_num_threads();
    set_num_threads(3);
    const Tensor large = arange(0, 1 << 18).to(DType::f32);
    const auto rounded = large.to(t).to_vector<double>();
    const Nearest nearest(t);
    int wrong = 0;
    for (size_t i = 0; i < rounded.size(); ++i)
      wrong += rounded[i] != value_of(t, nearest(static_cast<double>(i)));
    CHECK(wrong == 0);
    set_num_threads(threads);
  }
}

TEST_CASE("factories, fill_, item, to_vector, views and printing") {
  for (DType t : kTwoByte) {
    CHECK(zeros({3}, {.dtype = t}).to_vector<float>() == std::vector<float>{0, 0, 0});
    CHECK(ones({2}, {.dtype = t}).to_vector<int>() == std::vector<int>{1, 1});
    CHECK(arange(0, 4, 1, {.dtype = t}).to_vector<int>() == std::vector<int>{0, 1, 2, 3});
    CHECK(tensor(std::vector<double>{1, 2.5}, {2}, {.dtype = t}).to_vector<double>() ==
          std::vector<double>{1, 2.5});
    Tensor x = full({2, 3}, 1.0 / 3, {.dtype = t});
    const double third = value_of(t, Nearest(t)(1.0 / 3));
    CHECK(x.to_vector<double>() == std::vector<double>(6, third));
    x.select(1, 1).fill_(-4);
    CHECK(x.t().reshape({6}).to_vector<double>() ==
          std::vector<double>{third, third, -4, -4, third, third});
    CHECK(x.clone().to_vector<double>() == x.to_vector<double>());
    CHECK(x[1][1].item<int>() == -4);
    CHECK(x[1][1].item<float>() == -4.0f);
    CHECK(x.zero_().to_vector<double>() == std::vector<double>(6, 0.0));
    CHECK(zeros_like(x).dtype() == t);
  }
  CHECK(tensor(std::vector<float>{1.5f, -2}).to(DType::f16).to_string() ==
        "tensor([1.5, -2], shape [2], f16)");
  CHECK(scalar(kInf, {.dtype = DType::bf16}).to_string() == "tensor(inf, shape [], bf16)");
  CHECK(zeros({2}, {.dtype = DType::f16}).data<Half>()[1].bits == 0);
  CHECK_THROWS_AS(zeros({2}, {.dtype = DType::f16}).data<BFloat16>(), DTypeError);
}

TEST_CASE("the gradient of a cast is the cast back") {
  for (DType t : kTwoByte) {
    const Tensor x = tensor(std::vector<float>{1.1f, -2.3f, 1e-3f}).requires_grad_();
    const Tensor weight = tensor(std::vector<float>{1 + 0x1p-12f, 3, 0.1f});
    const Tensor y = x.to(t).to(DType::f32);
    sum(y * weight).backward();
    CHECK(x.grad().dtype() == DType::f32);
    CHECK(x.grad().to_vector<double>() == weight.to(t).to_vector<double>());
    // A leaf of two bytes, used in f32.
    const Tensor leaf = tensor(std::vector<float>{1, 2, 3}).to(t).requires_grad_();
    sum(leaf.to(DType::f32) * weight).backward();
    CHECK(leaf.grad().dtype() == t);
    CHECK(leaf.grad().to_vector<double>() == weight.to(t).to_vector<double>());
    // copy_ into a tensor of another dtype.
    const Tensor source = tensor(std::vector<double>{1, 2, 3}).requires_grad_();
    Tensor target = zeros({3}, {.dtype = t});
    target.copy_(source);
    sum(target.to(DType::f64) * 2.0).backward();
    CHECK(source.grad().to_vector<double>() == std::vector<double>{2, 2, 2});
  }
}

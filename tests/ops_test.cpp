// The driver over the element-wise op list: the list yields the cases, so an op cannot be added
// untested. Every op runs on every dtype and layout against a reference in double
// (ops_reference.h), on special values, and its first and second derivatives against differences of
// that reference. LOCKSTEP_OPS_MODE=perf prints nanoseconds per element, =support which op takes
// which dtype.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/node.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/parallel.h>

#include "ops_cases.h"

using namespace lockstep;
using namespace cases;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Which of n special values input k has at i: all pairs of the first two.
size_t place_of(int64_t i, size_t n, int k) {
  const auto at = static_cast<size_t>(i);
  return k == 0 ? at % n : k == 1 ? at / n : (at / n + at % n * 7) % n;
}

/// Compares the elements of y with what c's reference says of the inputs.
void check_forward(const Case& c, const Tensor& y, std::span<const Tensor> x) {
  std::vector<double> in[3];
  for (size_t k = 0; k < x.size(); ++k) in[k] = read(x[k].expand(y.shape()));
  const std::vector<double> got = read(y);
  for (size_t i = 0; i < got.size(); ++i) {
    double at[3] = {};
    for (size_t k = 0; k < x.size(); ++k) at[k] = in[k][i];
    double want = c.f(at), error = 0, allowed = 0;
    switch (y.dtype()) {
      case DType::f32:
        allowed = (4 * std::fabs(want) + c.slack) * 0x1p-24;
        break;
      case DType::f64:
        allowed = (16 * std::fabs(want) + c.slack) * 0x1p-53;
        break;
      case DType::f16:  // rounded once: half a unit in the last place, and what f32 lost before
        allowed = std::max(std::fabs(want) * 0x1.01p-11, 0x1p-25) + c.slack * 0x1p-24;
        if (std::fabs(want) >= 65520) want = std::copysign(INFINITY, want);
        break;
      case DType::bf16:
        allowed = std::fabs(want) * 0x1.01p-8 + c.slack * 0x1p-24;
        break;
      case DType::u8:
        want = static_cast<uint8_t>(static_cast<int64_t>(want));
        break;
      case DType::i8:
        want = static_cast<int8_t>(static_cast<int64_t>(want));
        break;
      case DType::i16:
        want = static_cast<int16_t>(static_cast<int64_t>(want));
        break;
      case DType::boolean:
        want = want != 0;
        break;
      default:
        break;
    }
    error = got[i] == want ? 0 : std::fabs(got[i] - want);
    if (std::isinf(want)) allowed = 0;
    if (error <= allowed || (std::isnan(got[i]) && std::isnan(want))) continue;
    FAIL_CHECK(c.label << " at (" << at[0] << ", " << at[1] << "), element " << i << ": " << got[i]
                       << ", not " << want);
    return;
  }
}

}  // namespace

TEST_CASE("element-wise ops of every dtype and layout agree with their references") {
  Random random;
  for (const Case& c : all_cases())
    for (DType t : kDTypes)
      for (const Layout& layout : kLayouts) {
        INFO(c.label, " of ", std::string(name_of(t)), ", ", std::string(layout.name));
        for (Tensor& second : partners(layout, t)) {
          std::vector<Tensor> x{layout.make(t)};
          if (c.inputs >= 2) x.push_back(second);
          if (c.inputs == 3) x.push_back(layout.make(t));
          for (Tensor& operand : x) write(operand, values_for(c, t, random));
          const std::optional<DType> dtype = expected_dtype(c, t);
          if (!dtype) {
            CHECK_THROWS_AS(c.call(x), DTypeError);
            break;
          }
          const Tensor y = c.call(x);
          CHECK(y.dtype() == *dtype);
          CHECK(y.shape() == x[0].shape());
          check_forward(c, y, x);
          if (!c.keeps_dtype && std::strcmp(layout.name, "channels-last") == 0)
            CHECK(y.is_channels_last());
          if (c.inputs == 1) break;
        }
      }
}

TEST_CASE("element-wise ops agree with their references on special values") {
  for (DType t : {DType::f32, DType::f64}) {
    std::vector<double> special{kNan, kInf,  -kInf,  0.0,  -0.0, 1,    -1,   2,    -2,
                                0.5,  1e-10, -1e-10, 20,   -20,  85,   -85,  88.5, -88.5,
                                88.8, -88.8, 104,    -104, 300,  -300, 1e20, -1e20};
    if (t == DType::f32)
      special.insert(special.end(), {1e-42, -1e-42, 1e-45, 1.2e-38, 1.1e38, -1.1e38});
    else
      special.insert(special.end(), {1e-310, -1e-310, 5e-324, 5e307, -5e307, 704.5, 705.5, 709.7,
                                     709.8, -740, -746, 3000, -3000});
    const size_t n = special.size();
    for (const Case& c : all_cases()) {
      const int64_t count = static_cast<int64_t>(c.inputs == 1 ? n : n * n);
      std::vector<Tensor> x{empty({count}, {.dtype = t})};
      write(x[0], [&](int64_t i) { return special[static_cast<size_t>(i) % n]; });
      for (int k = 1; k < c.inputs; ++k) {
        x.push_back(empty({count}, {.dtype = t}));
        write(x.back(), [&](int64_t i) { return special[place_of(i, n, k)]; });
      }
      const std::vector<double> got = read(c.call(x));
      std::vector<double> in[3];
      for (size_t k = 0; k < x.size(); ++k) in[k] = read(x[k]);
      for (size_t i = 0; i < got.size(); ++i) {
        double at[3] = {};
        for (size_t k = 0; k < x.size(); ++k) at[k] = in[k][i];
        // A product of inputs leaves the range of t where the reference's does not.
        if (c.inputs == 3 && std::fabs(at[1] * at[2]) > 1e30 && std::isfinite(at[1] * at[2])) continue;
        double want = c.f(at);
        if (t == DType::f32) want = static_cast<float>(want);
        const double scale = std::max(std::fabs(want), t == DType::f32 ? 1e-30 : 1e-290);
        const double allowed =
            t == DType::f32 ? scale * 1e-6 + c.slack * 0x1p-24 : scale * 1e-13 + c.slack * 0x1p-53;
        const bool same = std::isnan(want)   ? std::isnan(got[i])
                          : std::isinf(want) ? got[i] == want
                                             : std::fabs(got[i] - want) <= allowed;
        if (!same)
          FAIL_CHECK(c.label << " of " << name_of(t) << " at (" << at[0] << ", " << at[1]
                             << "): " << got[i] << ", not " << want);
      }
    }
  }
}

TEST_CASE("recorded derivatives equal the plain ones on every input") {
  for (DType t : {DType::f32, DType::f64}) {
    std::vector<double> special{kNan,  kInf,
                                -kInf, 0.0,
                                -0.0,  1,
                                -1,    2,
                                0.75,  -1.5,
                                1.5,   -3,
                                10,    -10,
                                37.4,  -38,
                                -87,   -87.6,
                                -100,  800,
                                -800,  1e-40,
                                1e20,  -1e20,
                                1e-20, std::numeric_limits<float>::max()};
    const size_t n = special.size();
    for (const Case& c : all_cases()) {
      if (c.predicate) continue;
      const int64_t count = static_cast<int64_t>(c.inputs == 1 ? n : n * n);
      std::vector<Tensor> x;
      for (int k = 0; k < c.inputs; ++k) {
        write(x.emplace_back(empty({count}, {.dtype = t})), [&](int64_t i) {
          return special[place_of(i, n, k)];
        });
        x.back().requires_grad_();
      }
      for (double arriving : {1.0, -0.7, 0.0, 1e30, kInf, kNan}) {
        const Tensor dy = full({count}, arriving, {.dtype = t});
        const auto plain = autograd::grad({c.call(x)}, x, {dy}, {});
        const auto recorded = autograd::grad({c.call(x)}, x, {dy}, {.create_graph = true});
        for (size_t k = 0; k < x.size(); ++k) {
          const std::vector<double> p = read(plain[k]), r = read(recorded[k].detach());
          for (size_t i = 0; i < p.size(); ++i)
            if (p[i] != r[i] && !(std::isnan(p[i]) && std::isnan(r[i]))) {
              FAIL_CHECK(c.label << " of " << name_of(t) << ", input " << k << ", element " << i
                                 << ", arriving " << arriving << ": plain " << p[i] << ", recorded "
                                 << r[i]);
              break;
            }
        }
      }
    }
  }
}

TEST_CASE("probe() of every op finds all that its derivatives read") {
  for (const Case& c : all_cases()) CHECK_MESSAGE(c.reads_declared, c.label);
}

namespace {

/// The five-point difference of f along one of its arguments; error about 1e-12.
double slope(const std::function<double(const double*)>& f, const double* at, int along) {
  constexpr double h = 1e-3;
  auto value = [&](double step) {
    double moved[] = {at[0], at[1], at[2]};
    moved[along] += step;
    return f(moved);
  };
  return (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h);
}

Tensor random_like(const Tensor& t, Random& random) {
  Tensor w = empty(t.shape(), {.dtype = t.dtype()});
  write(w, [&](int64_t) { return random(0.5, 1.5); });
  return w;
}

/// Adds up what an operand of `shape` receives from elements of the broadcast shape.
std::vector<double> folded(const std::vector<double>& v, const Shape& full, const Shape& shape) {
  std::vector<double> sums(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) {
    int64_t rest = static_cast<int64_t>(i), index = 0, stride = 1;
    for (int d = full.dims() - 1, own = shape.dims() - 1; d >= 0; rest /= full[d], --d, --own) {
      if (own < 0) continue;
      if (shape[own] != 1) index += rest % full[d] * stride;
      stride *= shape[own];
    }
    sums[static_cast<size_t>(index)] += v[i];
  }
  return sums;
}

void check_close(const std::string& what, const Tensor& got, const std::vector<double>& want,
                 double tolerance) {
  const std::vector<double> g = read(got);
  REQUIRE(g.size() == want.size());
  for (size_t i = 0; i < g.size(); ++i)
    if (!(std::fabs(g[i] - want[i]) <= tolerance * (1 + std::fabs(want[i])))) {
      FAIL_CHECK(what << ", element " << i << ": " << g[i] << ", not " << want[i]);
      return;
    }
}

/// Shapes of two operands.
struct Pair {
  Shape a, b;
};

}  // namespace

TEST_CASE("first and second derivatives agree with differences of the reference") {
  Random random;
  const Pair pairs[] = {
      {{4, 5}, {4, 5}}, {{3, 1, 5}, {4, 1}}, {{6}, {}}, {{2, 3, 4, 5}, {3, 1, 1}}};
  for (const Case& c : all_cases()) {
    if (c.predicate) continue;
    for (const auto& [a_shape, b_shape] : pairs)
      for (DType t : {DType::f64, DType::f32}) {
        if (c.keeps_dtype && a_shape != broadcast_shapes("test", a_shape, b_shape)) continue;
        INFO(c.label, " of ", std::string(name_of(t)));
        std::vector<Tensor> x;
        for (int k = 0; k < c.inputs; ++k) x.push_back(empty(k ? b_shape : a_shape, {.dtype = t}));
        for (size_t k = 0; k < x.size(); ++k) {
          const auto value = values_for(c, t, random);
          // Two inputs lie on grids that never meet: maximum has a kink where they are equal.
          write(x[k], [&](int64_t i) {
            return x.size() == 1
                       ? value(i)
                       : std::floor(10 * value(i)) / 10 + 0.02 + 0.05 * static_cast<double>(k);
          });
          x[k].requires_grad_();
        }
        const Tensor y = c.call(x), w = random_like(y, random);
        const std::vector<Tensor> plain = autograd::grad({y}, x, {w}, {});
        const std::vector<double> ws = read(w);
        std::vector<double> in[3];
        for (size_t k = 0; k < x.size(); ++k) in[k] = read(x[k].detach().expand(y.shape()));
        const auto elements = [&](size_t i) {
          std::array<double, 3> at{};
          for (size_t k = 0; k < x.size(); ++k) at[k] = in[k][i];
          return at;
        };
        const double tolerance = t == DType::f64 ? 1e-9 : 2e-5;
        for (size_t k = 0; k < x.size(); ++k) {
          std::vector<double> want(ws.size());
          for (size_t i = 0; i < ws.size(); ++i) {
            want[i] = ws[i] * slope(c.f, elements(i).data(), static_cast<int>(k));
          }
          check_close(str_cat(c.label, ": derivative by input ", k), plain[k],
                      folded(want, y.shape(), x[k].shape()), tolerance);
        }
        if (t == DType::f32) continue;

        // Recorded: the same gradients, and theirs.
        const Tensor y2 = c.call(x);
        const std::vector<Tensor> recorded = autograd::grad({y2}, x, {w}, {.create_graph = true});
        for (size_t k = 0; k < x.size(); ++k)
          check_close(str_cat(c.label, ": recorded derivative by input ", k), recorded[k].detach(),
                      read(plain[k]), 1e-12);
        std::vector<Tensor> v;
        Tensor total = scalar(0, {.dtype = t});
        for (const Tensor& g : recorded) {
          v.push_back(random_like(g, random));
          total = total + sum(g * v.back());
        }
        std::vector<double> vs[3];
        for (size_t k = 0; k < x.size(); ++k) vs[k] = read(v[k].expand(y.shape()));
        for (size_t k = 0; k < x.size(); ++k) {
          std::vector<double> want(ws.size());
          for (size_t i = 0; i < ws.size(); ++i) {
            auto weighted = [&](const double* p) {
              double s = 0;
              for (size_t m = 0; m < x.size(); ++m)
                s += vs[m][i] * slope(c.f, p, static_cast<int>(m));
              return s;
            };
            want[i] = ws[i] * slope(weighted, elements(i).data(), static_cast<int>(k));
          }
          const std::vector<double> sums = folded(want, y.shape(), x[k].shape());
          if (!total.requires_grad()) {  // a linear op: its gradient depends on nothing
            for (double s : sums) CHECK(std::fabs(s) < 1e-6);
            continue;
          }
          const Tensor second =
              autograd::grad({total}, {x[k]}, {}, {.retain_graph = true, .allow_unused = true})[0];
          if (second.defined())
            check_close(str_cat(c.label, ": second derivative by input ", k), second, sums, 1e-6);
          else
            for (double s : sums) CHECK(std::fabs(s) < 1e-6);
        }
      }
  }
}

TEST_CASE("gradients of channels-last inputs stay channels-last, and equal those of plain ones") {
  Random random;
  for (const Case& c : all_cases()) {
    if (c.predicate || c.keeps_dtype) continue;
    std::vector<Tensor> plain, last;
    for (int k = 0; k < c.inputs; ++k) {
      Tensor t = empty({2, 3, 4, 5});
      write(t, values_for(c, DType::f32, random));
      Tensor cl = empty({2, 4, 5, 3}).permute({0, 3, 1, 2});
      cl.copy_(t);
      plain.push_back(t.requires_grad_());
      last.push_back(cl.requires_grad_());
    }
    const Tensor w = random_like(plain[0], random);
    const auto a = autograd::grad({c.call(plain)}, plain, {w}, {}),
               b = autograd::grad({c.call(last)}, last, {w}, {});
    for (size_t k = 0; k < a.size(); ++k) CHECK(read(a[k]) == read(b[k]));
  }
}

TEST_CASE("in-place forms equal the others, and so do their gradients") {
  Random random;
  for (const Case& c : all_cases()) {
    if (!c.in_place) continue;
    for (const Layout& layout : kLayouts) {
      if (std::strcmp(layout.name, "broadcast") == 0) continue;
      INFO(c.label, ", ", std::string(layout.name));
      std::vector<Tensor> x;
      for (int k = 0; k < c.inputs; ++k)
        write(x.emplace_back(layout.make(DType::f32)), values_for(c, DType::f32, random));
      const std::vector<double> want = read(c.call(x));
      const uint32_t version = x[0].storage().version();
      c.in_place(x);
      CHECK(read(x[0]) == want);
      CHECK(x[0].storage().version() > version);
    }
    std::vector<Tensor> leaves;
    for (int k = 0; k < c.inputs; ++k) {
      write(leaves.emplace_back(empty({3, 4}, {.dtype = DType::f64})),
            values_for(c, DType::f64, random));
      leaves.back().requires_grad_();
    }
    std::vector<Tensor> x = leaves;
    x[0] = leaves[0] * 1.0;  // not a leaf
    const Tensor w = random_like(x[0], random);
    const auto want = autograd::grad({c.call(x)}, leaves, {w}, {});
    c.in_place(x);
    const auto got = autograd::grad({x[0]}, leaves, {w}, {});
    for (size_t k = 0; k < want.size(); ++k) CHECK(read(got[k]) == read(want[k]));
  }
}

TEST_CASE("results do not depend on the number of threads") {
  Random random;
  const int before = get_num_threads();
  for (const Case& c : all_cases()) {
    std::vector<Tensor> x;
    for (int k = 0; k < c.inputs; ++k)
      write(x.emplace_back(empty({301, 333})), values_for(c, DType::f32, random));
    set_num_threads(1);
    const std::vector<double> one = read(c.call(x));
    set_num_threads(3);
    CHECK(read(c.call(x)) == one);
  }
  set_num_threads(before);
}

TEST_CASE("mode perf: nanoseconds per element" * doctest::skip(!std::getenv("LOCKSTEP_OPS_MODE"))) {
  if (std::string(std::getenv("LOCKSTEP_OPS_MODE")) != "perf") return;
  Random random;
  set_num_threads(1);
  constexpr int64_t n = 65539;
  auto best = [](const std::function<void()>& f) {
    double seconds = 1;
    for (int i = 0; i < 60; ++i) {
      const auto start = std::chrono::steady_clock::now();
      f();
      seconds = std::min(
          seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds / static_cast<double>(n) * 1e9;
  };
  std::printf("%-20s %9s %9s\n", "f32, ns per element", "forward", "backward");
  for (const Case& c : all_cases()) {
    std::vector<Tensor> x;
    for (int k = 0; k < c.inputs; ++k)
      write(x.emplace_back(empty({n})), values_for(c, DType::f32, random));
    std::printf("%-20s %9.3f", c.label.c_str(), best([&] { c.call(x); }));
    if (!c.predicate) {
      for (Tensor& operand : x) operand.requires_grad_();
      const Tensor y = c.call(x), dy = random_like(y, random);
      std::printf(" %9.3f", best([&] { autograd::grad({y}, x, {dy}, {.retain_graph = true}); }));
    }
    std::puts("");
  }
}

TEST_CASE("mode support: which op takes which dtype" *
          doctest::skip(!std::getenv("LOCKSTEP_OPS_MODE"))) {
  if (std::string(std::getenv("LOCKSTEP_OPS_MODE")) != "support") return;
  std::printf("| op |");
  for (DType t : kDTypes) std::printf(" %s |", std::string(name_of(t)).c_str());
  std::puts(" gradient |");
  for (const Case& c : all_cases()) {
    std::printf("| %s |", c.label.c_str());
    for (DType t : kDTypes) {
      const std::vector<Tensor> x{ones({3}, {.dtype = t}), ones({3}, {.dtype = t})};
      std::string result = "-";
      try {
        result = name_of(c.call(std::span(x).first(static_cast<size_t>(c.inputs))).dtype());
      } catch (const DTypeError&) {
      }
      std::printf(" %s |", result.c_str());
    }
    std::printf(" %s |\n", c.predicate ? "-" : "yes");
  }
}

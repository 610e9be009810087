// Random programs: the library against plain arrays of double and finite differences, and against itself
// in other layouts, dtypes and thread counts. LOCKSTEP_PROGRAMS is how many (2000); LOCKSTEP_PROGRAMS_SEED
// where their seeds start; LOCKSTEP_PROGRAMS_DUMP a file that programs_torch.py runs through PyTorch.
// LOCKSTEP_TEST_FRACTION=0.1 runs every tenth of them, from LOCKSTEP_TEST_SEED (modulo ten) on.
#include "programs.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <optional>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/parallel.h>

using namespace lockstep;
using plain::Value;
using programs::Instruction;
using programs::Program;

namespace {

using V = std::vector<double>;

// ---- the loss: a weighted sum of all values, other weights for each ----

double weight(size_t value, size_t element) {
  return (static_cast<double>((element * 37 + value * 11) % 17) - 8) / 8;
}

/// The loss on plain arrays, or nothing if some value is large or not finite.
std::optional<double> plain_loss(const Program& p, const std::vector<V>& inputs) {
  std::vector<Value> values;
  for (size_t i = 0; i < inputs.size(); ++i)
    values.push_back(plain::fresh(p.inputs[i].shape, inputs[i]));
  for (const Instruction& in : p.instructions) programs::run(in, values);
  double loss = 0;
  for (size_t v = 0; v < values.size(); ++v)
    for (size_t i = 0; i < values[v].index.size(); ++i) {
      if (!(std::abs(values[v][i]) < 50)) return std::nullopt;
      loss += weight(v, i) * values[v][i];
    }
  return loss;
}

enum class Layout { contiguous, transposed, stepped };

/// What a run gives; `refused` if backward found that an in-place op overwrote what it needs.
struct Run {
  V loss;
  std::vector<V> gradients, second;
  bool refused = false;
  bool operator==(const Run&) const = default;
};

Tensor leaf_of(const Value& v, DType dtype, Layout layout) {
  const Tensor t = tensor(plain::elements(v), lockstep::Shape(std::span<const int64_t>(v.shape)),
                          {.dtype = dtype});
  Tensor y = t;
  if (layout == Layout::transposed && t.dim() > 1) {
    y = t.transpose(0, -1).contiguous().transpose(0, -1).detach();
  } else if (layout == Layout::stepped && t.dim() > 0) {
    lockstep::Shape wide = t.shape();
    wide[t.dim() - 1] *= 2;
    y = full(wide, 9, {.dtype = dtype}).slice(-1, {.start = 1, .step = 2}).detach();
    y.copy_(t);
  }
  return y.requires_grad_();
}

Run run(const Program& p, DType dtype, Layout layout, bool second = false) {
  std::vector<Tensor> leaves, values;
  for (const Value& v : p.inputs) leaves.push_back(leaf_of(v, dtype, layout));
  values = leaves;
  for (const Instruction& in : p.instructions) programs::run(in, values);
  Tensor loss = zeros({}, {.dtype = dtype});
  for (size_t v = 0; v < values.size(); ++v) {
    V weights;
    for (size_t i = 0; i < static_cast<size_t>(values[v].numel()); ++i)
      weights.push_back(weight(v, i));
    loss = loss + (values[v] * tensor(weights, values[v].shape(), {.dtype = dtype})).sum();
  }
  Run r;
  r.loss = loss.to_vector<double>();
  try {
    const autograd::GradOptions options{.create_graph = second};
    std::vector<Tensor> gradients = autograd::grad({loss}, leaves, {}, options);
    for (const Tensor& g : gradients) r.gradients.push_back(g.to_vector<double>());
    if (!second) return r;
    // The gradient of <gradients, direction>, where direction is all ones.
    Tensor along = zeros({}, {.dtype = dtype});
    for (const Tensor& g : gradients) along = along + g.sum();
    if (!along.requires_grad()) {
      for (const V& g : r.gradients) r.second.push_back(V(g.size()));
      return r;
    }
    std::vector<Tensor> seconds = autograd::grad({along}, leaves, {}, {.allow_unused = true});
    for (size_t i = 0; i < leaves.size(); ++i)
      r.second.push_back(seconds[i].defined() ? seconds[i].to_vector<double>()
                                              : V(r.gradients[i].size()));
  } catch (const AutogradError& e) {
    if (std::string(e.what()).find("changed in place") == std::string::npos) throw;
    r = Run{r.loss, {}, {}, true};
  }
  return r;
}

// ---- comparisons ----

double largest(const std::vector<V>& all) {
  double m = 1;
  for (const V& v : all)
    for (double x : v) m = std::max(m, std::abs(x));
  return m;
}
/// The largest difference relative to the largest element of `want`.
double difference(const std::vector<V>& got, const std::vector<V>& want) {
  if (got.size() != want.size()) return INFINITY;
  const double scale = largest(want);
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i)
    for (size_t k = 0; k < got[i].size(); ++k) {
      const double d = std::abs(got[i][k] - want[i][k]) / scale;
      worst = d <= worst ? worst : d;  // NaN stays
    }
  return worst;
}

std::string text_of(const Program& p) {
  std::string text;
  for (size_t i = 0; i < p.inputs.size(); ++i)
    text += str_cat("  v", i, " = input ",
                    lockstep::Shape(std::span<const int64_t>(p.inputs[i].shape)), "\n");
  size_t next = p.inputs.size();
  for (const Instruction& in : p.instructions) {
    text += in.op.back() == '_' ? std::string("  ") : str_cat("  v", next++, " = ");
    text += str_cat(in.op, " v", in.a, in.b < 0 ? std::string() : str_cat(" v", in.b));
    for (int64_t n : in.numbers) text += str_cat(" ", n);
    text += '\n';
  }
  return text;
}

/// First and second derivatives against differences of the plain loss. Elements near a kink, where
/// differences to the left and to the right disagree, have no derivative to compare with.
void check_derivatives(const Program& p, const Run& r) {
  std::vector<V> x;
  for (const Value& v : p.inputs) x.push_back(plain::elements(v));
  const double scale = largest(r.gradients), h = 1e-5;
  auto at = [&](size_t i, size_t k, double step, double all) {
    std::vector<V> moved = x;
    moved[i][k] += step;
    for (V& v : moved)
      for (double& e : v) e += all;
    return plain_loss(p, moved).value_or(NAN);
  };
  const double middle = *plain_loss(p, x);
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t k = 0; k < x[i].size(); ++k) {
      const double right = (at(i, k, h, 0) - middle) / h, left = (middle - at(i, k, -h, 0)) / h;
      if (!p.smooth && !(std::abs(right - left) <= 1e-3 * scale)) continue;
      CHECK_MESSAGE(std::abs((right + left) / 2 - r.gradients[i][k]) <= 1e-6 * scale,
                    "gradient of v", i, "[", k, "]: ", r.gradients[i][k], ", by differences ",
                    (right + left) / 2);
    }
  if (r.second.empty()) return;
  const double seconds = largest(r.second), step = 1e-3;
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t k = 0; k < x[i].size(); ++k) {
      auto mixed = [&](double s) {
        return (at(i, k, s, s) - at(i, k, -s, s) - at(i, k, s, -s) + at(i, k, -s, -s)) /
               (4 * s * s);
      };
      const double want = (4 * mixed(step / 2) - mixed(step)) / 3;  // Richardson's extrapolation
      CHECK_MESSAGE(std::abs(want - r.second[i][k]) <= 1e-4 * seconds, "second derivative by v", i,
                    "[", k, "]: ", r.second[i][k], ", by differences ", want);
    }
}

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}
/// Whether this run includes program i: every k-th is, for a fraction of 1 / k.
bool is_chosen(uint64_t i) {
  const char* fraction = std::getenv("LOCKSTEP_TEST_FRACTION");
  const double part = fraction ? std::atof(fraction) : 1;
  REQUIRE_MESSAGE((part > 0 && part <= 1), "LOCKSTEP_TEST_FRACTION is in (0, 1]");
  const uint64_t k = static_cast<uint64_t>(std::lround(1 / part));
  return i % k == number("LOCKSTEP_TEST_SEED", 0) % k;
}

/// Calls f for those of n programs, whose values stay small, that this run includes. Returns how many.
template <class F>
uint64_t for_each_program(uint64_t n, bool large, F f) {
  uint64_t ran = 0;
  uint64_t seed = number("LOCKSTEP_PROGRAMS_SEED", 0) + (large ? 1u << 30 : 0);
  for (uint64_t made = 0; made < n; ++seed) {
    const Program p = programs::Maker(seed, large).make();
    std::vector<V> x;
    for (const Value& v : p.inputs) x.push_back(plain::elements(v));
    const auto loss = plain_loss(p, x);
    if (!loss || !is_chosen(made++)) continue;
    ++ran;
    CAPTURE(seed);
    const std::string text = text_of(p);
    INFO(text);
    f(p, *loss);
  }
  return ran;
}

/// One line of JSON: the program, its inputs, and what the library made of it.
void dump(std::ostream& out, const Program& p, const Run& r) {
  auto list = [&](const auto& all, auto one) {
    out << '[';
    for (size_t i = 0; i < all.size(); ++i) {
      if (i) out << ", ";
      one(all[i]);
    }
    out << ']';
  };
  auto write = [&](const auto& x) { out << x; };
  out.precision(17);
  out << "{\"inputs\": ";
  list(p.inputs, [&](const Value& v) {
    out << "{\"shape\": ";
    list(v.shape, write);
    out << ", \"elements\": ";
    list(plain::elements(v), write);
    out << '}';
  });
  out << ", \"instructions\": ";
  list(p.instructions, [&](const Instruction& in) {
    out << "[\"" << in.op << "\", " << in.a << ", " << in.b << ", ";
    list(in.numbers, write);
    out << ']';
  });
  out << ", \"refused\": " << (r.refused ? "true" : "false") << ", \"loss\": " << r.loss[0]
      << ", \"gradients\": ";
  list(r.gradients, [&](const V& g) { list(g, write); });
  out << "}\n";
}

}  // namespace

TEST_CASE("random programs agree with plain arrays, finite differences, other layouts and f32") {
  const char* file = std::getenv("LOCKSTEP_PROGRAMS_DUMP");
  std::ofstream out(file ? file : "/dev/null");
  uint64_t refused = 0;
  const uint64_t ran = for_each_program(
      number("LOCKSTEP_PROGRAMS", 2000), false, [&](const Program& p, double loss) {
        const Run r = run(p, DType::f64, Layout::contiguous, p.smooth);
        if (file) dump(out, p, r);
        CHECK(difference({r.loss}, {{loss}}) < 1e-11);
        if (r.refused) {
          ++refused;
          return;
        }
        check_derivatives(p, r);
        for (Layout layout : {Layout::transposed, Layout::stepped}) {
          const Run other = run(p, DType::f64, layout, p.smooth);
          CHECK(difference({other.loss}, {r.loss}) < 1e-12);
          CHECK(difference(other.gradients, r.gradients) < 1e-11);
          CHECK(difference(other.second, r.second) < 1e-9);
        }
        if (!p.smooth) return;  // rounding may take the other side of a kink
        const Run single = run(p, DType::f32, Layout::contiguous);
        CHECK(difference({single.loss}, {r.loss}) < 1e-4);
        CHECK(difference(single.gradients, r.gradients) < 1e-3);
      });
  MESSAGE(refused, " of ", ran, " programs overwrite what backward needs");
  CHECK(refused < ran / 2);
}

TEST_CASE("random programs of larger tensors give the same bits on one thread and on three") {
  const int before = get_num_threads();
  for_each_program(number("LOCKSTEP_PROGRAMS", 2000) / 40 + 1, true,
                   [&](const Program& p, double loss) {
                     std::vector<Run> runs;
                     for (int threads : {1, 3}) {
                       set_num_threads(threads);
                       runs.push_back(run(p, DType::f32, Layout::contiguous));
                       runs.push_back(run(p, DType::f64, Layout::contiguous));
                     }
                     CHECK(runs[0] == runs[2]);
                     CHECK(runs[1] == runs[3]);
                     CHECK(difference({runs[1].loss}, {{loss}}) < 1e-9);
                   });
  set_num_threads(before);
}

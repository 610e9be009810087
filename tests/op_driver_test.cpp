// The driver over all ops: each row of op_driver/rows_*.cpp is run on every dtype and layout, empty
// and 0-d operands, aliased operands, special values and several threads, with first and second
// derivatives against differences of its reference, and the gradient that create_graph records
// against the plain one. An op that no row reaches fails the last test.
// LOCKSTEP_TEST_DEVICE=late runs the ops on the second device of the tests. LOCKSTEP_TEST_FRACTION=0.1 runs a tenth of the checks of rows, LOCKSTEP_TEST_SEED=7 the seventh,
// LOCKSTEP_OPS_ONLY=text the rows whose name has it.
#include <doctest/doctest.h>

#include <set>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/op.h>
#include <lockstep/tensor/parallel.h>

#include "late_device/moved.h"
#include "op_driver/checks.h"

namespace op_driver {

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (auto* family :
       {reduction_rows, softmax_rows, loss_rows, norm_rows, convolution_rows, product_rows,
        indexing_rows, view_rows, join_rows, choice_rows, in_place_rows})
    for (Row& row : family()) rows.push_back(std::move(row));
  if (late::is_asked_for())
    for (Row& row : rows)
      row.call = [call = std::move(row.call)](const Tensors& x) {
        Tensors there;
        for (const Tensor& operand : x) there.push_back(late::moved(operand));
        return call(there).to(Device());
      };
  return rows;
}

}  // namespace op_driver

using namespace op_driver;
using op_check::gradients;

namespace {

/// Calls f(row, source of its values) for the rows that this run tries; an exception fails its row
/// alone.
template <class F>
void each_row(const std::string& check, F f) {
  const char* only = std::getenv("LOCKSTEP_OPS_ONLY");
  for (const Row& row : all_rows()) {
    if (only ? row.name.find(only) == std::string::npos : !is_chosen(check + row.name)) continue;
    INFO(row.name);
    try {
      std::mt19937 random = random_of(check + row.name);
      f(row, random);
    } catch (const std::exception& e) {
      FAIL_CHECK(std::string(e.what()));
    }
  }
}
bool contains(const std::vector<DType>& list, DType t) {
  return std::find(list.begin(), list.end(), t) != list.end();
}

/// The operands to differentiate by.
std::vector<size_t> differentiable(const Row& row, size_t operands) {
  std::vector<size_t> list;
  for (size_t k = 0; k < operands; ++k)
    if (row.operand(k).kind == Operand::Kind::real && row.operand(k).differentiable)
      list.push_back(k);
  return list;
}

/// The row as a function of the operands to differentiate by; the others are as in x.
op_check::Function function_of(const Row& row, const Tensors& x) {
  return [&row, x](const Tensors& leaves) {
    Tensors all = x;
    size_t next = 0;
    for (size_t k : differentiable(row, x.size())) all[k] = leaves[next++];
    return row.call(all);
  };
}
Tensors leaves_of(const Row& row, const Tensors& x) {
  Tensors leaves;
  for (size_t k : differentiable(row, x.size())) leaves.push_back(x[k].detach().requires_grad_());
  return leaves;
}

Tensor weights_like(const Tensor& y, std::mt19937& random) {
  Tensor w = empty(y.shape(), {.dtype = y.dtype()});
  write(w, values_for({}, w.dtype(), w.numel(), random));
  return w;
}

double slack_of(const Row& row, DType t) {
  return row.slack * (t == DType::f16 || t == DType::bf16 ? row.ops : 1);
}

/// The row's result on x agrees with its reference, and x is what it was.
void check_forward(const Row& row, const std::string& what, DType t, const Tensors& x,
                   Real scale = 1) {
  const Arrays before = read(x);
  const std::optional<Array> want = expected(row, before);
  if (!want) {
    CHECK_THROWS_AS(row.call(x), Error);
    return;
  }
  const Tensor y = row.call(x);
  CHECK(y.dtype() == row.result(t));
  const double tolerance = is_floating(t) ? slack_of(row, t) * tolerance_of(t) : 0;
  check_agree(what, y, *want, tolerance, scale);
  for (size_t k = 0; k < x.size(); ++k) check_agree(what + ": operand", x[k], before[k], 0);
}

}  // namespace

TEST_CASE("op driver: every dtype and layout agrees with the reference, or is refused") {
  each_row("every dtype", [&](const Row& row, std::mt19937& random) {
    for (DType t : kAll) {
      const bool documented = contains(row.dtypes, t);
      for (bool edge : {false, true})
        for (const Shapes& shapes : edge ? row.edges : row.shapes)
          for (const Arrangement& a : arrangements(row, shapes, t, random)) {
            const std::string what = str_cat(row.name, " of ", shapes[0], ", ", t, ", ", a.name);
            INFO(what);
            try {
              check_forward(row, what, t, a.x);
            } catch (const DTypeError& e) {
              CHECK_MESSAGE(!documented, std::string(e.what()));
            } catch (const Error& e) {
              CHECK_MESSAGE((!documented && edge), std::string(e.what()));
            }
          }
    }
  });
}

TEST_CASE("op driver: derivatives agree with differences of the reference, also recorded ones") {
  each_row("derivatives", [&](const Row& row, std::mt19937& random) {
    if (!row.differentiable) return;
    const double tolerance = 1e-9 * row.slack;
    for (bool edge : {false, true})
      for (const Shapes& shapes : edge ? row.edges : row.shapes) {
        const std::string what = str_cat(row.name, " of ", shapes[0]);
        INFO(what);
        const Tensors x = contiguous_operands(row, shapes, DType::f64, random);
        const Arrays at = read(x);
        const std::optional<Array> y = expected(row, at);
        if (!y || !std::all_of(y->v.begin(), y->v.end(), [](Real v) { return std::isfinite(v); }))
          continue;
        const std::vector<size_t> by = differentiable(row, x.size());
        Tensors leaves = leaves_of(row, x);
        const auto f = function_of(row, x);
        Tensor w = weights_like(f(leaves), random);
        const Array weights = read(w);
        const Tensors plain = gradients(f, leaves, w, false);
        w.requires_grad_();
        const Tensors recorded = gradients(f, leaves, w, true);
        Arrays direction(x.size());  // to differentiate along a second time
        Tensors starts, outputs;
        for (size_t i = 0; i < by.size(); ++i) {
          const auto part = " by operand " + std::to_string(by[i]);
          const Array want = slopes(
              at, by[i], [&](const Arrays& moved) { return dot(weights, row.reference(moved)); });
          check_agree(what + ": derivative" + part, plain[i], want, tolerance);
          check_agree(what + ": recorded derivative" + part, recorded[i].detach(), want, tolerance);
          const Tensor v = weights_like(x[by[i]], random);
          direction[by[i]] = read(v);
          if (!recorded[i].requires_grad()) continue;
          outputs.push_back(recorded[i]);
          starts.push_back(v);
        }
        Tensors all = leaves;
        all.push_back(w);
        Tensors second(all.size());
        if (!outputs.empty()) second = autograd::grad(outputs, all, starts, {.allow_unused = true});
        for (size_t i = 0; i < all.size(); ++i)
          if (!second[i].defined()) second[i] = zeros_like(all[i].detach());
        const auto along = [&](const Arrays& from) {
          return slope(
              [&](Real h) { return dot(weights, row.reference(moved(from, direction, h))); });
        };
        for (size_t i = 0; i < by.size(); ++i)
          check_agree(what + ": second derivative by operand " + std::to_string(by[i]), second[i],
                      slopes(at, by[i], along), 100 * tolerance);
        Array by_w(w.shape());
        for (size_t i = 0; i < by_w.v.size(); ++i)
          by_w.v[i] = slope([&](Real h) { return row.reference(moved(at, direction, h)).v[i]; });
        check_agree(what + ": second derivative by dy", second.back(), by_w, 100 * tolerance);
      }
  });
}

TEST_CASE("op driver: gradients do not depend on the layout of operands and dy; f32's are f64's") {
  each_row("gradients", [&](const Row& row, std::mt19937& random) {
    if (!row.differentiable) return;
    for (const Shapes& shapes : row.shapes)
      for (DType t : kFloats)
        for (const Arrangement& a : arrangements(row, shapes, t, random)) {
          const std::string what = str_cat(row.name, " of ", shapes[0], ", ", t, ", ", a.name);
          INFO(what);
          Tensors dense;  // the same values, contiguous, in f64
          for (const Tensor& x : a.x) {
            dense.push_back(empty(x.shape(), {.dtype = x.dtype() == t ? DType::f64 : x.dtype()}));
            write(dense.back(), read(x).v);
          }
          const auto f = function_of(row, a.x), f_dense = function_of(row, dense);
          const Tensors leaves = leaves_of(row, a.x), dense_leaves = leaves_of(row, dense);
          const Tensor y = f_dense(dense_leaves);
          for (const op_check::Layout& dy : op_check::layouts(
                   y.shape(), [&](const Shape& s) { return empty(s, {.dtype = t}); })) {
            write(dy.x, values_for({}, t, dy.x.numel(), random));
            Tensor dense_dy = empty(y.shape(), {.dtype = DType::f64});
            write(dense_dy, read(dy.x).v);
            const Tensors want = gradients(f_dense, dense_leaves, dense_dy, false);
            for (bool create_graph : {false, true}) {
              const Tensors got = gradients(f, leaves, dy.x, create_graph);
              for (size_t k = 0; k < got.size(); ++k) {
                CHECK(got[k].dtype() == t);
                check_agree(what + ", dy " + dy.name + (create_graph ? ", recorded" : ""),
                            got[k].detach(), read(want[k]), 10 * slack_of(row, t) * tolerance_of(t));
              }
            }
          }
        }
  });
}

namespace {

/// x with some elements of its operands replaced by special values.
void put_special_values(const Row& row, const Tensors& x, bool huge, std::mt19937& random) {
  const double inf = std::numeric_limits<double>::infinity();
  const double largest = x[0].dtype() == DType::f64 ? 1.5e308 : 3e38;
  std::vector<Real> special;
  if (huge)
    special = {largest, -0.41 * largest, 0.62 * largest, -0.97 * largest, 1};
  else
    special = {0, -0.0, inf, -inf, std::nan(""), 1e-42, -1e-30, 1, 1, 50, -200};
  for (size_t k = 0; k < x.size(); ++k) {
    const Operand operand = row.operand(k);
    if (!operand.special || (huge && !operand.huge) || !is_floating(x[k].dtype())) continue;
    std::vector<Real> v = read(x[k]).v;
    for (Real& value : v)
      if (random() % 5 == 0) value = special[random() % special.size()];
    write(x[k], v);
  }
}

}  // namespace

TEST_CASE("op driver: special values give what the reference gives") {
  each_row("special values", [&](const Row& row, std::mt19937& random) {
    for (const Shapes& shapes : row.shapes)
      for (DType t : kFloats)
        for (bool huge : {false, true})
          for (int round = 0; round < 12 && (!huge || contains(row.huge, t)); ++round) {
            const Tensors x = contiguous_operands(row, shapes, t, random);
            put_special_values(row, x, huge, random);
            const std::optional<Array> want = expected(row, read(x));
            std::string values;
            for (const Tensor& operand : x) values += operand.to_string() + " ";
            INFO(values);
            check_forward(row, str_cat(row.name, ", ", t), t, x, want ? largest(want->v) : 1);
          }
  });
}

TEST_CASE("op driver: a recorded gradient is the plain one, on special values too") {
  each_row("a recorded gradient", [&](const Row& row, std::mt19937& random) {
    if (!row.differentiable) return;
    for (const Shapes& shapes : row.shapes)
      for (DType t : kFloats)
        for (bool huge : {false, true})
          for (int round = 0; round < 12 && (!huge || contains(row.huge, t)); ++round) {
            const Tensors x = contiguous_operands(row, shapes, t, random);
            put_special_values(row, x, huge, random);
            const Tensors leaves = leaves_of(row, x);
            const auto f = function_of(row, x);
            const Tensor w = weights_like(f(leaves), random);
            const Tensors plain = gradients(f, leaves, w, false),
                          recorded = gradients(f, leaves, w, true);
            std::string values;
            for (const Tensor& operand : x) values += operand.to_string() + " ";
            INFO(values);
            for (size_t k = 0; k < plain.size(); ++k)
              check_agree(str_cat(row.name, ", ", t, ": gradient ", k), recorded[k].detach(),
                          read(plain[k]), 10 * slack_of(row, t) * tolerance_of(t),
                          largest(read(plain[k]).v));
          }
  });
}

TEST_CASE("op driver: many lengths and large operands agree with the reference, also gradients") {
  each_row("every dtype, many lengths", [&](const Row& row, std::mt19937& random) {
    std::vector<Shapes> all = row.lengths;
    if (!row.large.empty()) all.push_back(row.large);
    for (const Shapes& shapes : all)
      for (DType t : row.dtypes) {
        const std::string what = str_cat(row.name, " of ", shapes[0], ", ", t);
        INFO(what);
        const Tensors x = contiguous_operands(row, shapes, t, random);
        Arrays magnitudes = read(x);  // of the terms that may cancel each other
        for (Array& a : magnitudes)
          for (Real& v : a.v) v = std::fabs(v);
        const Real scale =
            std::max(largest(row.reference(read(x)).v), largest(row.reference(magnitudes).v));
        check_forward(row, what, t, x, scale);
        if (!row.differentiable || t != DType::f32) continue;
        Tensors wide;
        for (const Tensor& operand : x)
          wide.push_back(operand.dtype() == t ? operand.to(DType::f64) : operand);
        const Tensors leaves = leaves_of(row, x), wide_leaves = leaves_of(row, wide);
        const Tensor w = weights_like(row.call(x), random);
        const Tensors got = gradients(function_of(row, x), leaves, w, false),
                      want =
                          gradients(function_of(row, wide), wide_leaves, w.to(DType::f64), false);
        for (size_t k = 0; k < got.size(); ++k)
          check_agree(str_cat(what, ": gradient ", k), got[k], read(want[k]),
                      row.slack * tolerance_of(t), largest(read(want[k]).v));
      }
  });
}

TEST_CASE("op driver: integers that no float holds are exact") {
  constexpr Real kBeyond = 0x1p63L;
  each_row("every dtype, large integers", [&](const Row& row, std::mt19937& random) {
    for (DType t : {DType::i64, DType::i32}) {
      if (!contains(row.dtypes, t)) continue;
      for (const Shapes& shapes : row.shapes)
        for (const int bits : {t == DType::i64 ? 61 : 30, t == DType::i64 ? 54 : 25}) {
          const std::string what = str_cat(row.name, " of ", shapes[0], ", ", t);
          INFO(what);
          const Tensors x = contiguous_operands(row, shapes, t, random);
          for (size_t k = 0; k < x.size(); ++k) {
            if (row.operand(k).kind != Operand::Kind::real) continue;
            std::vector<Real> v(static_cast<size_t>(x[k].numel()));
            for (Real& value : v) {
              const auto magnitude = (uint64_t{random()} << 32 | random()) >> (64 - bits);
              value = (random() % 2 ? -1 : 1) * static_cast<Real>(magnitude | 1);
            }
            write(x[k], v);
          }
          const std::optional<Array> want = expected(row, read(x));
          if (want && largest(want->v) < kBeyond) check_forward(row, what, t, x);
        }
    }
  });
}

TEST_CASE("op driver: of equal elements the first gets the gradient, where that is the rule") {
  each_row("equal elements", [&](const Row& row, std::mt19937& random) {
    if (!row.first_wins) return;
    for (const Shapes& shapes : row.shapes)
      for (const Arrangement& a : arrangements(row, shapes, DType::f64, random)) {
        if (a.name == "expanded") continue;
        INFO(str_cat(row.name, " of ", shapes[0], ", ", a.name));
        std::vector<Real> equal(static_cast<size_t>(a.x[0].numel())), apart = equal;
        for (size_t i = 0; i < equal.size(); ++i) {
          equal[i] = random() % 2;
          apart[i] = equal[i] - 1e-6L * static_cast<Real>(i);
        }
        Tensors other{empty(shapes[0], {.dtype = DType::f64})};
        write(a.x[0], equal);
        write(other[0], apart);
        const Tensor w = weights_like(row.call(a.x), random);
        for (bool create_graph : {false, true})
          check_agree(
              row.name, gradients(function_of(row, a.x), leaves_of(row, a.x), w, create_graph)[0],
              read(gradients(function_of(row, other), leaves_of(row, other), w, false)[0]), 1e-12);
      }
  });
}

TEST_CASE("op driver: operands may be the same tensor, or overlapping views of one") {
  each_row("operands", [&](const Row& row, std::mt19937& random) {
    if (!row.differentiable) return;
    for (const Shapes& shapes : row.shapes) {
      const std::vector<size_t> by = differentiable(row, shapes.size());
      if (by.size() < 2 || shapes[by[0]] != shapes[by[1]] || shapes[by[0]].dims() == 0) continue;
      for (int64_t shift : {0, 1}) {
        const std::string what = str_cat(row.name, " of ", shapes[0], ", shifted by ", shift);
        INFO(what);
        Tensors x = contiguous_operands(row, shapes, DType::f64, random);
        const int64_t n = shapes[by[0]][0];
        Shape wide = shapes[by[0]];
        wide[0] = n + shift;
        Tensor base = empty(wide, {.dtype = DType::f64});
        write(base, values_for({}, DType::f64, base.numel(), random));
        base.requires_grad_();
        x[by[0]] = shift ? base.narrow(0, 0, n) : base;
        x[by[1]] = shift ? base.narrow(0, shift, n) : base;
        const Tensor y = row.call(x), w = weights_like(y, random);
        check_agree(what, y.detach(), row.reference(read(x)), row.slack * 1e-12);
        // What the two places of the base receive, from operands of their own.
        Tensors apart;
        for (const Tensor& operand : x) apart.push_back(operand.detach().clone());
        const Tensors parts = gradients(function_of(row, apart), leaves_of(row, apart), w, false);
        Array want(wide);
        for (size_t k = 0; k < 2; ++k)
          for_each_index(shapes[by[0]], [&](Shape i) {
            const Real v = read(parts[k])(i);
            i[0] += k ? shift : 0;
            want(i) += v;
          });
        for (bool create_graph : {false, true}) {
          const Tensor got = autograd::grad(
              {y}, {base}, {w}, {.retain_graph = true, .create_graph = create_graph})[0];
          check_agree(what + ": gradient", got.detach(), want, row.slack * 1e-11);
        }
      }
    }
  });
}

TEST_CASE("op driver: results and gradients do not depend on the number of threads") {
  const int before = get_num_threads();
  each_row("threads", [&](const Row& row, std::mt19937& random) {
    if (row.large.empty()) return;
    INFO(row.name);
    const Tensors x = contiguous_operands(row, row.large, DType::f32, random);
    const Tensors leaves = row.differentiable ? leaves_of(row, x) : Tensors();
    const auto f = function_of(row, x);
    std::vector<std::vector<Real>> results[2];
    const Tensor w = weights_like(row.call(x), random);
    for (int i : {0, 1}) {
      set_num_threads(i ? 3 : 1);
      results[i].push_back(read(row.call(x)).v);
      for (bool create_graph : {false, true})
        if (row.differentiable)
          for (const Tensor& g : gradients(f, leaves, w, create_graph))
            results[i].push_back(read(g).v);
    }
    set_num_threads(before);
    CHECK(results[0] == results[1]);
  });
}

namespace {

/// Notes the names of all ops that run, and of the nodes behind a result.
struct NameCollector final : OpHook {
  std::set<std::string> names;
  std::vector<Tensor> around(const OpInfo& op, std::span<const Tensor>, const Run& run) override {
    names.insert(op.name);
    return run();
  }
  void note_graph(const Tensor& y) {
    std::set<const Node*> seen;
    std::vector<const Node*> waiting{y.node().get()};
    while (!waiting.empty()) {
      const Node* node = waiting.back();
      waiting.pop_back();
      if (!node || !seen.insert(node).second) continue;
      names.insert(node->name());
      for (const Edge& input : node->inputs) waiting.push_back(input.node.get());
    }
  }
};

}  // namespace

TEST_CASE("op driver: every op of the library is reached by a row") {
  NameCollector seen;
  const OpHookGuard guard(seen);
  std::mt19937 random(8);
  for (const Row& row : all_rows())
    for (const Arrangement& a : arrangements(row, row.shapes[0], DType::f64, random)) {
      if (!row.differentiable) {
        row.call(a.x);
        continue;
      }
      const Tensors leaves = leaves_of(row, a.x);
      const auto f = function_of(row, a.x);
      const Tensor y = f(leaves);
      seen.note_graph(y);
      Tensor w = weights_like(y, random).requires_grad_();
      Tensors all = leaves, outputs, starts;
      all.push_back(w);
      for (const Tensor& g : gradients(f, leaves, w, true)) {
        if (!g.requires_grad()) continue;
        outputs.push_back(g);
        starts.push_back(weights_like(g, random));
      }
      autograd::grad(outputs, all, starts, {.create_graph = true, .allow_unused = true});
    }
  // The element-wise ops have a driver of their own, whose cases come from the list of the ops.
  for (const cases::Case& c : cases::all_cases())
    seen.names.insert(c.label.substr(0, c.label.find(' ')));
  seen.names.insert("batch_norm's shared sum");  // ranks share a batch in sync_batch_norm_test.cpp
  for (const std::string& name : op_names())
    CHECK_MESSAGE(seen.names.count(name) == 1, "no row of tests/op_driver reaches ", name);
}

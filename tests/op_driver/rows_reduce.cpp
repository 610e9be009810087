// Reductions: sum, mean, var, max and argmax over every form of `dims`, and sum_to.
#include <algorithm>
#include <cmath>

#include <lockstep/tensor/ops/reduce.h>

#include "row.h"

namespace op_driver {
namespace {

const std::vector<Shapes> kShapes{{{3, 4, 5}}, {{2, 3, 1, 4}}};
const std::vector<Shapes> kEdges{{{0, 2, 3}}, {{2, 0, 3}}, {{2, 3, 0}}, {{1, 1, 1}}};

struct Dims {
  std::string text;
  Shape dims;
};
const std::vector<Dims> kDims{{"all", {}},
                              {"dim 0", {0}},
                              {"dim 1", {1}},
                              {"dim -1", {-1}},
                              {"dims 0, 2", {0, 2}},
                              {"dims 2, 1", {2, 1}},
                              {"dims 0, 1, 2", {0, 1, 2}}};

/// The formula over `n` elements behind each result.
using Formula = std::function<Real(const std::vector<Real>&)>;

Real mean_of(const std::vector<Real>& v) { return sum_of(v) / static_cast<Real>(v.size()); }
Formula variance(double correction) {
  return [=](const std::vector<Real>& v) {
    const Real m = mean_of(v);
    Real s = 0;
    for (Real x : v) s += (x - m) * (x - m);
    return s / std::max(Real(0), static_cast<Real>(v.size()) - correction);
  };
}
Real norm_of(const std::vector<Real>& v) {
  Real s = 0;
  for (Real x : v) s += x * x;
  return std::sqrt(s);
}
Real checked_max(const std::vector<Real>& v) {
  if (v.empty()) throw Refused();
  return max_of(v);
}
Real argmax_of(const std::vector<Real>& v) {
  if (v.empty()) throw Refused();
  size_t best = 0;
  for (size_t i = 1; i < v.size(); ++i)
    if (v[best] == v[best] && (v[i] > v[best] || v[i] != v[i])) best = i;
  return static_cast<Real>(best);
}

/// A row for each form of `dims`, with and without keepdim.
template <class F>
void add_forms(std::vector<Row>& rows, const std::string& op, F call, Formula formula, Row row) {
  for (const Dims& d : kDims)
    for (bool keepdim : {false, true}) {
      row.name = op + ", " + d.text + (keepdim ? ", kept" : "");
      row.shapes = kShapes;
      row.edges = kEdges;
      row.lengths = {{{3, 7, 17}}, {{17, 2, 33}}, {{1, 67, 1}}, {{5, 1, 35}}};
      row.call = [=](const Tensors& x) { return call(x[0], d.dims, keepdim); };
      row.reference = [=](const Arrays& x) { return reduce(x[0], d.dims, keepdim, formula); };
      row.large = {{40, 50, 60}};
      rows.push_back(row);
    }
}
/// The same for ops of one dimension.
template <class F>
void add_each_dim(std::vector<Row>& rows, const std::string& op, F call, Formula formula, Row row) {
  for (int dim : {0, 1, -1})
    for (bool keepdim : {false, true}) {
      row.name = op + " " + std::to_string(dim) + (keepdim ? ", kept" : "");
      row.shapes = kShapes;
      row.edges = kEdges;
      row.lengths = {{{3, 7, 17}}, {{17, 2, 33}}, {{1, 67, 1}}};
      row.call = [=](const Tensors& x) { return call(x[0], dim, keepdim); };
      row.reference = [=](const Arrays& x) { return reduce(x[0], {dim}, keepdim, formula); };
      row.large = {{40, 50, 60}};
      rows.push_back(row);
    }
}
/// The same over all elements, 0-d tensors too.
template <class F>
void add_total(std::vector<Row>& rows, const std::string& op, F call, Formula formula, Row row) {
  row.name = op + " of all";
  row.shapes = {{{3, 4}}, {{2, 3, 2, 2}}};
  row.edges = {{Shape{}}, {{1}}, {{0}}, {{2, 0}}};
  row.lengths = {{{7}}, {{17}}, {{67}}, {{5, 131}}};
  row.call = [=](const Tensors& x) { return call(x[0]); };
  row.reference = [=](const Arrays& x) { return reduce(x[0], {}, false, formula); };
  row.large = {{300, 400}};
  rows.push_back(row);
}

Row sum_to_row(const std::string& text, const Shape& from, const Shape& to) {
  return {.name = "sum_to " + text,
          .shapes = {{from}},
          .call = [=](const Tensors& x) { return sum_to(x[0], to); },
          .reference =
              [=](const Arrays& x) {
                Array y(to);
                for_each_index(x[0].shape, [&](const Shape& i) { y(i) += x[0](i); });
                return y;
              },
          .dtypes = kAll,
          // What needs no sum is x itself.
          .result = from == to ? same_dtype : total_dtype,
          .huge = {DType::f32}};
}

}  // namespace

std::vector<Row> reduction_rows() {
  std::vector<Row> rows;
  // Nothing is wider than f64, so a sum of f64 may overflow on its way.
  const Row numbers{.dtypes = kAll, .result = total_dtype, .huge = {DType::f32}}, floats;
  const auto sum_dims = [](const Tensor& x, const Shape& d, bool k) { return sum(x, d, k); };
  const auto mean_dims = [](const Tensor& x, const Shape& d, bool k) { return mean(x, d, k); };
  add_forms(rows, "sum", sum_dims, sum_of, numbers);
  add_forms(rows, "mean", mean_dims, mean_of, floats);
  for (double correction : {0.0, 1.0, 2.5}) {
    const auto call = [=](const Tensor& x, const Shape& d, bool k) {
      return var(x, d, correction, k);
    };
    add_forms(rows, "var, correction " + std::to_string(correction), call, variance(correction),
              floats);
  }
  add_forms(rows, "norm",
            [](const Tensor& x, const Shape& d, bool k) { return norm(x, d, k); }, norm_of,
            floats);
  add_forms(rows, "amax",
            [](const Tensor& x, const Shape& d, bool k) { return amax(x, d, k); }, checked_max,
            {.dtypes = kAll});
  add_forms(rows, "amin",
            [](const Tensor& x, const Shape& d, bool k) { return amin(x, d, k); },
            [](std::vector<Real> v) {
              for (Real& x : v) x = -x;
              return -checked_max(v);
            },
            {.dtypes = kAll});
  const Row truth{.dtypes = kAll,
                  .result = [](DType) { return DType::boolean; },
                  .differentiable = false};
  add_forms(rows, "any", [](const Tensor& x, const Shape& d, bool k) { return any(x, d, k); },
            [](const std::vector<Real>& v) {
              return Real(std::any_of(v.begin(), v.end(), [](Real x) { return !(x == 0); }));
            },
            truth);
  add_forms(rows, "all", [](const Tensor& x, const Shape& d, bool k) { return all(x, d, k); },
            [](const std::vector<Real>& v) {
              return Real(std::all_of(v.begin(), v.end(), [](Real x) { return !(x == 0); }));
            },
            truth);
  add_total(
      rows, "sum", [](const Tensor& x) { return sum(x); }, sum_of, numbers);
  add_total(
      rows, "mean", [](const Tensor& x) { return mean(x); }, mean_of, floats);
  add_total(
      rows, "var", [](const Tensor& x) { return var(x); }, variance(1), floats);
  add_total(rows, "max", [](const Tensor& x) { return max(x); }, checked_max, {.dtypes = kAll});
  add_each_dim(rows, "max, dim", [](const Tensor& x, int d, bool k) { return max(x, d, k).values; },
               checked_max, {.dtypes = kAll, .first_wins = true});
  const Row indices{.dtypes = kAll, .result = index_dtype, .differentiable = false};
  add_each_dim(
      rows, "max's indices, dim",
      [](const Tensor& x, int d, bool k) { return max(x, d, k).indices; }, argmax_of, indices);
  add_each_dim(
      rows, "argmax, dim", [](const Tensor& x, int d, bool k) { return argmax(x, d, k); },
      argmax_of, indices);
  rows.push_back(sum_to_row("rows", {4, 3}, {3}));
  rows.push_back(sum_to_row("columns", {4, 3}, {4, 1}));
  rows.push_back(sum_to_row("0-d", {4, 3}, {}));
  rows.push_back(sum_to_row("the middle", {2, 4, 3}, {1, 4, 1}));
  rows.push_back(sum_to_row("itself", {4, 3}, {4, 3}));
  rows.push_back(sum_to_row("of nothing", {0, 3}, {3}));
  return rows;
}

}  // namespace op_driver

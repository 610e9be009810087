// Products: matmul of every combination of ranks, and linear with and without bias and activation.
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/matmul.h>

#include "row.h"

namespace op_driver {
namespace {

Array matmul_reference(Array a, Array b) {
  const bool row = a.shape.dims() == 1, column = b.shape.dims() == 1;
  if (row) a.shape.insert(0, 1);
  if (column) b.shape.insert(1, 1);
  const int da = a.shape.dims(), db = b.shape.dims();
  const int64_t m = a.shape[da - 2], k = a.shape[da - 1], n = b.shape[db - 1];
  Shape shape;  // the leading dimensions broadcast
  for (int d = std::max(da, db) - 2; d > 0; --d) {
    const int64_t x = d <= da - 2 ? a.shape[da - 2 - d] : 1;
    const int64_t y = d <= db - 2 ? b.shape[db - 2 - d] : 1;
    shape.push_back(x == 1 ? y : x);
  }
  shape.push_back(m);
  shape.push_back(n);
  const int last = shape.dims() - 1;
  Array y = tabulate(shape, [&](const Shape& index) {
    Shape at_a = index, at_b = index;
    Real s = 0;
    for (int64_t i = 0; i < k; ++i) {
      at_a[last] = i;
      at_b[last - 1] = i;
      s += a(at_a) * b(at_b);
    }
    return s;
  });
  if (column) y.shape.erase(last);
  if (row) y.shape.erase(last - 1);
  return y;
}

Array linear_reference(const Arrays& x, bool relu) {
  const Array &in = x[0], &w = x[1];
  const int last = in.shape.dims() - 1;
  Shape shape = in.shape;
  shape[last] = w.shape[0];
  return tabulate(shape, [&](const Shape& index) {
    Shape at = index;
    Real s = x.size() > 2 ? x[2].v[static_cast<size_t>(index[last])] : 0;
    for (int64_t i = 0; i < w.shape[1]; ++i) {
      at[last] = i;
      s += in(at)*w({index[last], i});
    }
    return relu && s < 0 ? 0 : s;
  });
}

}  // namespace

std::vector<Row> product_rows() {
  std::vector<Row> rows;
  rows.push_back({.name = "matmul",
                  .shapes = {{{4}, {4}},
                             {{4}, {4, 3}},
                             {{2, 4}, {4}},
                             {{2, 4}, {4, 3}},
                             {{3, 3}, {3, 3}},
                             {{1, 5}, {5, 1}},
                             {{5, 1}, {1, 4}},
                             {{4}, {2, 4, 3}},
                             {{2, 3, 4}, {4}},
                             {{2, 3, 4}, {4, 2}},
                             {{3, 4}, {2, 4, 2}},
                             {{2, 3, 4}, {2, 4, 2}},
                             {{2, 1, 2, 3}, {3, 3, 2}},
                             {{1, 2, 3}, {2, 3, 2}}},
                  .call = [](const Tensors& x) { return matmul(x[0], x[1]); },
                  .reference = [](const Arrays& x) { return matmul_reference(x[0], x[1]); },
                  .edges = {{{0}, {0}},
                            {{0, 3}, {3, 2}},
                            {{2, 0}, {0, 3}},
                            {{2, 3}, {3, 0}},
                            {{0, 2, 3}, {3, 2}},
                            {{2, 2, 0}, {2, 0, 2}},
                            {{0}, {0, 3}}},
                  .lengths = {{{17, 33}, {33, 19}},
                              {{1, 67}, {67, 1}},
                              {{67}, {67}},
                              {{1, 600}, {600, 3}},
                              {{9, 1}, {1, 35}},
                              {{3, 17, 5}, {5, 33}}},
                  .large = {{130, 257}, {257, 70}},
                  .huge = {},
                  .slack = 4});
  rows.push_back({.name = "matmul of a batch",
                  .shapes = {{{2, 2, 3}, {2, 3, 2}}},
                  .call = [](const Tensors& x) { return matmul(x[0], x[1]); },
                  .reference = [](const Arrays& x) { return matmul_reference(x[0], x[1]); },
                  .large = {{6, 40, 64}, {6, 64, 48}},
                  .huge = {},
                  .slack = 4});
  for (bool relu : {false, true})
    for (bool bias : {false, true}) {
      Row row{.name = std::string("linear") + (bias ? " with bias" : "") + (relu ? ", relu" : ""),
              .call =
                  [=](const Tensors& x) {
                    return linear(x[0], x[1], bias ? x[2] : Tensor(),
                                  relu ? Activation::relu : Activation::none);
                  },
              .reference = [=](const Arrays& x) { return linear_reference(x, relu); },
              .large = {{150, 200}, {130, 200}},
              .huge = {},
              .slack = 4};
      row.shapes = {{{5, 4}, {3, 4}}, {{4}, {3, 4}}, {{2, 3, 4}, {5, 4}}, {{1, 1}, {1, 1}}};
      row.edges = {{{0, 4}, {3, 4}}, {{2, 4}, {0, 4}}, {{2, 0}, {3, 0}}, {{2, 0, 4}, {3, 4}}};
      row.lengths = {{{17, 33}, {19, 33}}, {{1, 67}, {33, 67}}, {{3, 1}, {35, 1}}};
      if (bias) {
        for (Shapes& s : row.lengths) s.push_back({s[1][0]});
        for (Shapes& s : row.shapes) s.push_back({s[1][0]});
        for (Shapes& s : row.edges) s.push_back({s[1][0]});
        row.large.push_back({130});
      }
      rows.push_back(row);
    }
  return rows;
}

}  // namespace op_driver

// softmax and log_softmax along every dimension.
#include <lockstep/tensor/ops/softmax.h>

#include <cmath>

#include "row.h"

namespace op_driver {
namespace {

/// In place: x - log(sum(exp(x))), with the maximum taken out.
void log_softmax_slice(std::vector<Real>& v) {
  if (v.empty()) return;
  const Real m = max_of(v);
  Real s = 0;
  for (Real x : v) s += std::exp(x - m);
  for (Real& x : v) x = (x - m) - std::log(s);
}
void softmax_slice(std::vector<Real>& v) {
  log_softmax_slice(v);
  for (Real& x : v) x = std::exp(x);
}

}  // namespace

std::vector<Row> softmax_rows() {
  std::vector<Row> rows;
  for (int dim : {0, 1, -1}) {
    Row row{.shapes = {{{3, 5}}, {{3, 2, 4}}, {{2, 3, 2, 2}}},
            .edges = {{{0, 3}}, {{3, 0}}, {{1, 1}}},
            .lengths = {{{3, 7}}, {{2, 17}}, {{17, 2}}, {{33, 67}}, {{2, 19, 3}}},
            .large = {{200, 301}}};
    row.name = "softmax, dim " + std::to_string(dim);
    row.call = [=](const Tensors& x) { return softmax(x[0], dim); };
    row.reference = [=](const Arrays& x) { return along(x[0], dim, softmax_slice); };
    rows.push_back(row);
    row.name = "log_softmax, dim " + std::to_string(dim);
    row.call = [=](const Tensors& x) { return log_softmax(x[0], dim); };
    row.reference = [=](const Arrays& x) { return along(x[0], dim, log_softmax_slice); };
    rows.push_back(row);
  }
  const std::vector<Shapes> one{{Shape{}}, {{4}}};
  rows.push_back({.name = "softmax of 0-d and 1-d",
                  .shapes = one,
                  .call = [](const Tensors& x) { return softmax(x[0], 0); },
                  .reference = [](const Arrays& x) { return along(x[0], 0, softmax_slice); }});
  rows.push_back({.name = "log_softmax of 0-d and 1-d",
                  .shapes = one,
                  .call = [](const Tensors& x) { return log_softmax(x[0], -1); },
                  .reference = [](const Arrays& x) { return along(x[0], 0, log_softmax_slice); }});
  return rows;
}

}  // namespace op_driver

// Normalisations: layer_norm, and batch_norm by the batch and by running statistics.
#include <cmath>

#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/ops/layer_norm.h>

#include "row.h"

namespace op_driver {
namespace {

constexpr double kEps = 0.1;  // large, so that equal rows (expanded ones) are well conditioned

/// The product with the weight may overflow where a bias of the other sign would bring the sum back
/// into range; whether it does depends on the instruction set (FMA does not round the product).
const Operand kBias{.huge = false};

struct Moments {
  Real mean = 0, variance = 0;
};
Moments moments_of(const std::vector<Real>& v) {
  Moments m;
  const Real n = static_cast<Real>(v.size());
  for (Real x : v) m.mean += x / n;
  for (Real x : v) m.variance += (x - m.mean) * (x - m.mean) / n;
  return m;
}

/// x [..., normalized], weight and bias [normalized], or absent.
Array layer_norm_reference(const Arrays& x, int dims) {
  Shape last;
  for (int d = 0; d < dims; ++d) last.push_back(d - dims);
  std::vector<Moments> moments;
  reduce(x[0], last, true, [&](const std::vector<Real>& v) {
    moments.push_back(moments_of(v));
    return Real(0);
  });
  const size_t n = moments.empty() ? 1 : x[0].v.size() / moments.size();
  Array y = x[0];
  for (size_t i = 0; i < y.v.size(); ++i) {
    const Moments& m = moments[i / n];
    y.v[i] = (y.v[i] - m.mean) / std::sqrt(m.variance + kEps);
    if (x.size() > 1) y.v[i] *= x[1].v[i % n];
    if (x.size() > 2) y.v[i] += x[2].v[i % n];
  }
  return y;
}

Shape all_but_channels(const Shape& shape) {
  Shape dims;
  for (int d = 0; d < shape.dims(); ++d)
    if (d != 1) dims.push_back(d);
  return dims;
}

/// x [N, C, ...], then weight and bias [C].
Array batch_norm_reference(const Arrays& x, const std::vector<Moments>& moments) {
  return tabulate(x[0].shape, [&](const Shape& i) {
    const auto c = static_cast<size_t>(i[1]);
    const Real y = (x[0](i) - moments[c].mean) / std::sqrt(moments[c].variance + kEps);
    return x.size() > 1 ? y * x[1].v[c] + x[2].v[c] : y;
  });
}
std::vector<Moments> batch_moments(const Array& x) {
  std::vector<Moments> moments;
  reduce(x, all_but_channels(x.shape), true, [&](const std::vector<Real>& v) {
    moments.push_back(moments_of(v));
    return Real(0);
  });
  return moments;
}

Row layer_norm_row(const std::string& text, std::vector<Shapes> shapes, const Shape& normalized) {
  return {.name = "layer_norm" + text,
          .shapes = std::move(shapes),
          .call =
              [=](const Tensors& x) {
                return layer_norm(x[0], normalized, x.size() > 1 ? x[1] : Tensor(),
                                  x.size() > 2 ? x[2] : Tensor(), kEps);
              },
          .reference = [=](const Arrays& x) { return layer_norm_reference(x, normalized.dims()); },
          .operands = {{}, {}, kBias},
          .slack = 10};
}

}  // namespace

std::vector<Row> norm_rows() {
  std::vector<Row> rows;
  Row plain = layer_norm_row("", {{{3, 5}}, {{2, 3, 5}}}, {5});
  plain.edges = {{{0, 5}}};
  plain.large = {{4000, 5}};
  rows.push_back(plain);
  for (int64_t n : {1, 17, 67}) {
    Row row = layer_norm_row(" of rows of " + std::to_string(n), {{{2, n}, {n}, {n}}}, {n});
    row.lengths = {{{33, n}, {n}, {n}}};
    rows.push_back(row);
  }
  Row affine =
      layer_norm_row(" with weight and bias", {{{4, 5}, {5}, {5}}, {{2, 2, 5}, {5}, {5}}}, {5});
  affine.edges = {{{0, 5}, {5}, {5}}};
  affine.large = {{3000, 5}, {5}, {5}};
  rows.push_back(affine);
  rows.push_back(layer_norm_row(" with weight", {{{4, 5}, {5}}}, {5}));
  rows.push_back(layer_norm_row(" over two dimensions",
                                {{{2, 3, 4}, {3, 4}, {3, 4}}, {{3, 4}, {3, 4}, {3, 4}}}, {3, 4}));

  Row batch{
      .name = "batch_norm by the batch",
      .shapes = {{{5, 3}}, {{3, 2, 4}}, {{2, 2, 2, 3}}},
      .call = [](const Tensors& x) { return batch_norm(x[0], {}, {}, {}, {}, true, 0.1, kEps); },
      .reference = [](const Arrays& x) { return batch_norm_reference(x, batch_moments(x[0])); },
      .edges = {{{0, 3}}, {{0, 2, 2, 2}}, {{3, 0}}},
      .lengths = {{{17, 7}}, {{3, 17}}, {{2, 67, 3}}, {{3, 2, 35}}, {{2, 19, 3, 7}}},
      .large = {{40, 8, 20, 20}},
      .slack = 10};
  rows.push_back(batch);
  batch.name = "batch_norm by the batch, with weight and bias";
  batch.call = [](const Tensors& x) {
    return batch_norm(x[0], {}, {}, x[1], x[2], true, 0.1, kEps);
  };
  batch.operands = {{}, {}, kBias};
  for (Shapes& s : batch.shapes) s.insert(s.end(), 2, Shape{s[0][1]});
  for (Shapes& s : batch.lengths) s.insert(s.end(), 2, Shape{s[0][1]});
  batch.edges = {{{0, 3}, {3}, {3}}};
  batch.large.insert(batch.large.end(), 2, Shape{8});
  rows.push_back(batch);
  batch.name = "batch_norm by running statistics";
  batch.call = [](const Tensors& x) {
    return batch_norm(x[0], x[3].detach(), x[4].detach(), x[1], x[2], false, 0.1, kEps);
  };
  batch.reference = [](const Arrays& x) {
    std::vector<Moments> moments;
    for (size_t c = 0; c < x[3].v.size(); ++c) moments.push_back({x[3].v[c], x[4].v[c]});
    return batch_norm_reference({x[0], x[1], x[2]}, moments);
  };
  batch.operands = {{},
                    {},
                    kBias,
                    {.differentiable = false},
                    {.low = 0.5, .special = false, .differentiable = false}};
  for (Shapes& s : batch.shapes) s.insert(s.end(), 2, Shape{s[0][1]});
  for (Shapes& s : batch.lengths) s.insert(s.end(), 2, Shape{s[0][1]});
  for (Shapes& s : batch.edges) s.insert(s.end(), 2, Shape{s[0][1]});
  batch.large.insert(batch.large.end(), 2, Shape{8});
  rows.push_back(batch);
  return rows;
}

}  // namespace op_driver

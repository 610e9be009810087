// Convolution and pooling.
#include <algorithm>
#include <cmath>

#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/ops/pool.h>

#include "row.h"

namespace op_driver {
namespace {

int64_t windows(int64_t size, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
  const int64_t room = size + 2 * pad - dilation * (kernel - 1) - 1;
  if (room < 0) throw Refused();
  return room / stride + 1;
}

Array conv_reference(const Arrays& in, const Conv2dOptions& o) {
  const Array &x = in[0], &w = in[1];
  const Shape shape{x.shape[0], w.shape[0],
                    windows(x.shape[2], w.shape[2], o.stride.h, o.padding.h, o.dilation.h),
                    windows(x.shape[3], w.shape[3], o.stride.w, o.padding.w, o.dilation.w)};
  const int64_t per_group = w.shape[1], outs = w.shape[0] / o.groups;
  return tabulate(shape, [&](const Shape& i) {
    Real s = in.size() > 2 ? in[2].v[static_cast<size_t>(i[1])] : 0;
    for_each_index({per_group, w.shape[2], w.shape[3]}, [&](const Shape& k) {
      const int64_t row = i[2] * o.stride.h - o.padding.h + k[1] * o.dilation.h;
      const int64_t column = i[3] * o.stride.w - o.padding.w + k[2] * o.dilation.w;
      if (row < 0 || row >= x.shape[2] || column < 0 || column >= x.shape[3]) return;
      s += x({i[0], i[1] / outs * per_group + k[0], row, column}) * w({i[1], k[0], k[1], k[2]});
    });
    return s;
  });
}

Array pool_reference(const Array& x, Size2d window, const MaxPool2dOptions& o) {
  const Size2d stride = o.stride.value_or(window);
  const Shape shape{x.shape[0], x.shape[1], windows(x.shape[2], window.h, stride.h, o.padding.h, 1),
                    windows(x.shape[3], window.w, stride.w, o.padding.w, 1)};
  return tabulate(shape, [&](const Shape& i) {
    std::vector<Real> seen;
    for_each_index({window.h, window.w}, [&](const Shape& k) {
      const int64_t row = i[2] * stride.h - o.padding.h + k[0];
      const int64_t column = i[3] * stride.w - o.padding.w + k[1];
      if (row >= 0 && row < x.shape[2] && column >= 0 && column < x.shape[3])
        seen.push_back(x({i[0], i[1], row, column}));
    });
    return max_of(seen);
  });
}

Row conv_row(const std::string& text, std::vector<Shapes> shapes, Conv2dOptions o) {
  // Padding may be read as zeros, which an infinite weight makes NaN.
  const Operand weight{.special = false};
  return {
      .name = "conv2d" + text,
      .shapes = std::move(shapes),
      .call =
          [=](const Tensors& x) { return conv2d(x[0], x[1], x.size() > 2 ? x[2] : Tensor(), o); },
      .reference = [=](const Arrays& x) { return conv_reference(x, o); },
      .operands = {{}, weight, {}},
      .huge = {},
      .slack = 4};
}
Row pool_row(const std::string& text, std::vector<Shapes> shapes, Size2d window,
             MaxPool2dOptions o) {
  return {.name = "max_pool2d" + text,
          .shapes = std::move(shapes),
          .call = [=](const Tensors& x) { return max_pool2d(x[0], window, o); },
          .reference = [=](const Arrays& x) { return pool_reference(x[0], window, o); },
          .dtypes = kAll,
          .first_wins = true};
}

}  // namespace

std::vector<Row> convolution_rows() {
  std::vector<Row> rows;
  Row plain = conv_row("", {{{2, 2, 4, 3}, {3, 2, 2, 2}}, {{1, 1, 3, 3}, {1, 1, 3, 3}}}, {});
  plain.edges = {{{0, 2, 4, 3}, {3, 2, 2, 2}}};
  plain.large = {{8, 3, 20, 20}, {16, 3, 3, 3}};
  rows.push_back(plain);
  Row biased = conv_row(" with bias", {{{2, 2, 3, 4}, {3, 2, 2, 3}, {3}}}, {});
  biased.edges = {{{0, 2, 3, 4}, {3, 2, 2, 3}, {3}}};
  biased.lengths = {{{2, 17, 7, 19}, {19, 17, 3, 2}, {19}}, {{1, 3, 5, 33}, {17, 3, 1, 1}, {17}}};
  biased.large = {{8, 4, 20, 20}, {8, 4, 3, 3}, {8}};
  rows.push_back(biased);
  rows.push_back(conv_row(", 1x1", {{{2, 3, 3, 2}, {2, 3, 1, 1}, {2}}}, {}));
  rows.push_back(conv_row(", padded and strided", {{{1, 2, 5, 4}, {2, 2, 3, 3}, {2}}},
                          {.stride = {2, 1}, .padding = {1, 2}}));
  rows.push_back(
      conv_row(", dilated", {{{1, 2, 5, 5}, {2, 2, 2, 3}}}, {.padding = 1, .dilation = {3, 2}}));
  rows.push_back(conv_row(", in groups", {{{2, 4, 3, 3}, {6, 2, 2, 2}, {6}}}, {.groups = 2}));
  rows.back().lengths = {{{2, 34, 5, 5}, {6, 17, 3, 3}, {6}}};
  rows.push_back(
      conv_row(", depthwise", {{{1, 3, 4, 4}, {3, 1, 3, 3}}}, {.padding = 1, .groups = 3}));

  Row pool = pool_row("", {{{2, 2, 4, 6}}, {{1, 3, 5, 5}}}, 2, {});
  pool.edges = {{{0, 2, 4, 4}}, {{2, 0, 4, 4}}, {{1, 1, 1, 1}}};
  pool.lengths = {{{2, 17, 4, 6}}, {{1, 2, 35, 8}}};
  pool.large = {{8, 16, 30, 30}};
  rows.push_back(pool);
  Row overlapping = pool_row(", overlapping and padded", {{{2, 2, 5, 4}}}, 3,
                             {.stride = Size2d(1, 2), .padding = 1});
  overlapping.lengths = {{{2, 17, 4, 6}}, {{1, 2, 35, 8}}};
  overlapping.large = {{8, 8, 30, 30}};
  rows.push_back(overlapping);
  rows.push_back(pool_row(", with gaps", {{{1, 2, 7, 7}}}, {1, 2}, {.stride = Size2d(3, 3)}));
  return rows;
}

}  // namespace op_driver

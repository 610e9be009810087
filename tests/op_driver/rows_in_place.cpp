// In-place forms as functions: a copy of the first operand, written to through views of it, and what
// the copy or another view of it holds afterwards. op_in_place_test.cpp has the rest of them.
#include <lockstep/tensor/ops/elementwise.h>

#include "row.h"

namespace op_driver {
namespace {

/// `write` changes a clone of x[0], which is the result.
Row in_place_row(const std::string& name, std::vector<Shapes> shapes,
                 std::function<void(Tensor& base, const Tensors& x)> write,
                 std::function<void(Array& base, const Arrays& x)> reference) {
  return {.name = name,
          .shapes = std::move(shapes),
          .call =
              [=](const Tensors& x) {
                Tensor base = x[0].clone();
                write(base, x);
                return base;
              },
          .reference =
              [=](const Arrays& x) {
                Array base = x[0];
                reference(base, x);
                return base;
              }};
}

}  // namespace

std::vector<Row> in_place_rows() {
  std::vector<Row> rows;
  rows.push_back(in_place_row(
      "fill_ of a column", {{{3, 4}}},
      [](Tensor& base, const Tensors&) { base.select(1, 2).fill_(1); },
      [](Array& base, const Arrays&) {
        for (int64_t i = 0; i < 3; ++i) base({i, 2}) = 1;
      }));
  rows.back().dtypes = kAll;
  rows.push_back(in_place_row(
      "copy_ to steps of a row", {{{3, 5}, {2}}, {{3, 5}, {1}}},
      [](Tensor& base, const Tensors& x) {
        base[1].slice(0, {0, 4, 2}).copy_(x[1]);
      },
      [](Array& base, const Arrays& x) {
        for (int64_t i = 0; i < 2; ++i) base({1, 2 * i}) = x[1]({i});
      }));
  rows.back().dtypes = kAll;
  rows.push_back(in_place_row(
      "copy_ of one part to another that overlaps it", {{{4, 3}}},
      [](Tensor& base, const Tensors&) { base.narrow(0, 1, 3).copy_(base.narrow(0, 0, 3)); },
      [](Array& base, const Arrays& x) {
        for_each_index({3, 3}, [&](const Shape& i) { base({i[0] + 1, i[1]}) = x[0](i); });
      }));
  rows.back().dtypes = kAll;
  rows.push_back(in_place_row(
      "mul_ through views, twice", {{{3, 4}, {3}}},
      [](Tensor& base, const Tensors& x) {
        Tensor column = base.t()[1], all = base.view({12});
        column.mul_(x[1]);
        all.mul_(all);
        column.mul_(column);
      },
      [](Array& base, const Arrays& x) {
        for (int64_t i = 0; i < 3; ++i) base({i, 1}) *= x[1]({i});
        for (Real& v : base.v) v *= v;
        for (int64_t i = 0; i < 3; ++i) base({i, 1}) *= base({i, 1});
      }));
  rows.back().ops = 5;
  rows.back().huge = {};
  Row sibling = in_place_row("add_, seen through another view", {{{3, 4}, {4}}}, {}, {});
  sibling.call = [](const Tensors& x) {
    Tensor base = x[0].clone();
    const Tensor later = base.slice(0, {1, 3}).t();
    base[1].add_(x[1], 3);
    return later;
  };
  sibling.reference = [](const Arrays& x) {
    return tabulate({4, 2}, [&](const Shape& i) {
      return x[0]({i[1] + 1, i[0]}) + (i[1] == 0 ? 3 * x[1]({i[0]}) : 0);
    });
  };
  sibling.huge = {};
  rows.push_back(sibling);
  Row expanded = in_place_row("mul_, seen through an expanded view", {{{3}, {}}}, {}, {});
  expanded.call = [](const Tensors& x) {
    Tensor base = x[0].clone();
    const Tensor later = base.expand({2, 3});
    base.mul_(x[1]);
    return later;
  };
  expanded.reference = [](const Arrays& x) {
    return tabulate({2, 3}, [&](const Shape& i) { return x[0](i) * x[1].v[0]; });
  };
  expanded.huge = {};
  rows.push_back(expanded);
  return rows;
}

}  // namespace op_driver

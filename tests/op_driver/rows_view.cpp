// Views, and the copies that contiguous, clone and to make: elements rearranged, never computed, so
// every dtype takes part and every element arrives exactly.
#include <cmath>

#include "row.h"

namespace op_driver {
namespace {

/// Where the element at an index of the result stands in x.
using Source = std::function<Shape(const Shape& index)>;

Row view_row(const std::string& name, const Shape& from, const Shape& to,
             std::function<Tensor(const Tensor&)> call, Source source) {
  return {.name = name,
          .shapes = {{from}},
          .call = [=](const Tensors& x) { return call(x[0]); },
          .reference =
              [=](const Arrays& x) {
                return tabulate(to, [&](const Shape& i) { return x[0](source(i)); });
              },
          .dtypes = kAll};
}
/// A result that has x's elements in their row-major order.
Row reshape_row(const std::string& name, const Shape& from, const Shape& to,
                std::function<Tensor(const Tensor&)> call) {
  return {.name = name,
          .shapes = {{from}},
          .call = [=](const Tensors& x) { return call(x[0]); },
          .reference =
              [=](const Arrays& x) {
                Array y = x[0];
                y.shape = to;
                return y;
              },
          .dtypes = kAll};
}

Real converted(Real v, DType t) {
  switch (t) {
    case DType::boolean:
      return v != 0;
    case DType::i64:
    case DType::i32:
    case DType::i16:
    case DType::i8:
    case DType::u8:
      return std::trunc(v);
    default:
      return v;
  }
}

void add_reshapes(std::vector<Row>& rows) {
  const auto add = [&](const std::string& name, const Shape& from, const Shape& to,
                       std::function<Tensor(const Tensor&)> call) {
    rows.push_back(reshape_row(name, from, to, std::move(call)));
  };
  add("view", {2, 6}, {3, 4}, [](const Tensor& x) { return x.contiguous().view({3, 4}); });
  add("view, -1", {2, 3, 4}, {6, 4}, [](const Tensor& x) { return x.contiguous().view({-1, 4}); });
  add("view to 0-d", {1, 1}, {}, [](const Tensor& x) { return x.view({}); });
  add("view of nothing", {2, 0}, {0, 5}, [](const Tensor& x) { return x.view({0, 5}); });
  add("reshape", {2, 3, 4}, {4, 6}, [](const Tensor& x) { return x.reshape({4, 6}); });
  add("reshape, -1", {2, 3, 2, 2}, {2, 12}, [](const Tensor& x) { return x.reshape({2, -1}); });
  add("reshape to itself", {2, 3}, {2, 3}, [](const Tensor& x) { return x.reshape({2, 3}); });
  add("reshape of nothing", {0, 3}, {3, 0, 2}, [](const Tensor& x) {
    return x.reshape({3, 0, 2});
  });
  add("reshape of 0-d", {}, {1, 1}, [](const Tensor& x) { return x.reshape({1, 1}); });
  add("flatten", {2, 3, 2, 2}, {24}, [](const Tensor& x) { return x.flatten(); });
  add("flatten from 1", {2, 3, 2, 2}, {2, 12}, [](const Tensor& x) { return x.flatten(1); });
  add("flatten 1, 2", {2, 3, 2, 2}, {2, 6, 2}, [](const Tensor& x) { return x.flatten(1, 2); });
  add("flatten of 0-d", {}, {1}, [](const Tensor& x) { return x.flatten(); });
  add("squeeze", {3, 1, 2}, {3, 2}, [](const Tensor& x) { return x.squeeze(1); });
  add("squeeze of a larger size", {3, 2}, {3, 2}, [](const Tensor& x) { return x.squeeze(-1); });
  add("unsqueeze 0", {3, 2}, {1, 3, 2}, [](const Tensor& x) { return x.unsqueeze(0); });
  add("unsqueeze -1", {3, 2}, {3, 2, 1}, [](const Tensor& x) { return x.unsqueeze(-1); });
  add("contiguous", {2, 3, 2, 3}, {2, 3, 2, 3}, [](const Tensor& x) { return x.contiguous(); });
  add("clone", {2, 3, 2, 3}, {2, 3, 2, 3}, [](const Tensor& x) { return x.clone(); });
  add("clone of 0-d", {}, {}, [](const Tensor& x) { return x.clone(); });
  add("clone of nothing", {2, 0}, {2, 0}, [](const Tensor& x) { return x.clone(); });
}

void add_rearrangements(std::vector<Row>& rows) {
  const auto add = [&](const std::string& name, const Shape& from, const Shape& to,
                       std::function<Tensor(const Tensor&)> call, Source source) {
    rows.push_back(view_row(name, from, to, std::move(call), std::move(source)));
  };
  add(
      "permute", {2, 3, 4}, {4, 2, 3},
      [](const Tensor& x) {
        return x.permute({2, 0, 1});
      },
      [](const Shape& i) {
        return Shape{i[1], i[2], i[0]};
      });
  add(
      "permute, negative", {2, 3, 2, 4}, {2, 4, 3, 2},
      [](const Tensor& x) {
        return x.permute({0, -1, 1, 2});
      },
      [](const Shape& i) {
        return Shape{i[0], i[2], i[3], i[1]};
      });
  add(
      "permute of 0-d", {}, {}, [](const Tensor& x) { return x.permute({}); },
      [](const Shape& i) { return i; });
  add(
      "transpose", {2, 3, 4}, {4, 3, 2}, [](const Tensor& x) { return x.transpose(0, -1); },
      [](const Shape& i) {
        return Shape{i[2], i[1], i[0]};
      });
  add(
      "t", {2, 5}, {5, 2}, [](const Tensor& x) { return x.t(); },
      [](const Shape& i) {
        return Shape{i[1], i[0]};
      });
  add(
      "expand", {3, 1}, {2, 3, 4},
      [](const Tensor& x) {
        return x.expand({2, 3, 4});
      },
      [](const Shape& i) {
        return Shape{i[1], 0};
      });
  add(
      "expand, -1", {1, 3}, {4, 3},
      [](const Tensor& x) {
        return x.expand({4, -1});
      },
      [](const Shape& i) {
        return Shape{0, i[1]};
      });
  add(
      "expand of 0-d", {}, {2, 2},
      [](const Tensor& x) {
        return x.expand({2, 2});
      },
      [](const Shape&) { return Shape{}; });
  add(
      "expand to nothing", {1, 3}, {0, 3},
      [](const Tensor& x) {
        return x.expand({0, 3});
      },
      [](const Shape& i) { return i; });
  add(
      "slice", {5, 3}, {2, 3},
      [](const Tensor& x) {
        return x.slice(0, {1, 3});
      },
      [](const Shape& i) {
        return Shape{i[0] + 1, i[1]};
      });
  add(
      "slice, step", {2, 7}, {2, 3},
      [](const Tensor& x) {
        return x.slice(1, {1, 7, 2});
      },
      [](const Shape& i) {
        return Shape{i[0], 1 + 2 * i[1]};
      });
  add(
      "slice, negative", {2, 7}, {2, 2},
      [](const Tensor& x) {
        return x.slice(-1, {-3, -1});
      },
      [](const Shape& i) {
        return Shape{i[0], 4 + i[1]};
      });
  add(
      "slice beyond the end", {4, 2}, {1, 2},
      [](const Tensor& x) {
        return x.slice(0, {3, 99});
      },
      [](const Shape& i) {
        return Shape{3, i[1]};
      });
  add(
      "slice of nothing", {4, 2}, {0, 2},
      [](const Tensor& x) {
        return x.slice(0, {3, 1});
      },
      [](const Shape& i) { return i; });
  add(
      "narrow", {2, 3, 4}, {2, 2, 4}, [](const Tensor& x) { return x.narrow(1, 1, 2); },
      [](const Shape& i) {
        return Shape{i[0], i[1] + 1, i[2]};
      });
  add(
      "narrow to nothing", {2, 3}, {2, 0}, [](const Tensor& x) { return x.narrow(1, 3, 0); },
      [](const Shape& i) { return i; });
  add(
      "select", {2, 3, 4}, {2, 4}, [](const Tensor& x) { return x.select(1, 2); },
      [](const Shape& i) {
        return Shape{i[0], 2, i[1]};
      });
  add(
      "select, negative", {2, 3}, {3}, [](const Tensor& x) { return x[-1]; },
      [](const Shape& i) {
        return Shape{1, i[0]};
      });
  add(
      "select of 1-d", {4}, {}, [](const Tensor& x) { return x[2]; },
      [](const Shape&) { return Shape{2}; });
}

void add_conversions(std::vector<Row>& rows) {
  for (DType to : kAll) {
    rows.push_back({.name = "to " + std::string(name_of(to)),
                    .shapes = {{{3, 4}}, {{2, 3, 2, 2}}},
                    .call = [=](const Tensors& x) { return x[0].to(to); },
                    .reference =
                        [=](const Arrays& x) {
                          Array y = x[0];
                          for (Real& v : y.v) v = converted(v, to);
                          return y;
                        },
                    .operands = {{.low = 0, .high = 9, .special = is_floating(to)}},
                    .edges = {{Shape{}}, {{0, 3}}},
                    .large = {{300, 400}},
                    .dtypes = kAll,
                    .result = [=](DType) { return to; },
                    .differentiable = false});
  }
  // The gradient comes back in x's dtype, rounded once on its way.
  Row there_and_back = reshape_row("to f32 and back", {3, 4}, {3, 4},
                                   [](const Tensor& x) { return x.to(DType::f32).to(x.dtype()); });
  there_and_back.dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16};
  there_and_back.huge = {};
  there_and_back.slack = 1e6;
  rows.push_back(there_and_back);
}

}  // namespace

std::vector<Row> view_rows() {
  std::vector<Row> rows;
  add_reshapes(rows);
  add_rearrangements(rows);
  add_conversions(rows);
  return rows;
}

}  // namespace op_driver

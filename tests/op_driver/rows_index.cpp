// Reading and writing by index: take_along and put_along; joining: cat and stack; choosing: where
// and dropout.
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/join.h>
#include <lockstep/tensor/ops/take_along.h>
#include <lockstep/tensor/random.h>

#include "row.h"

namespace op_driver {
namespace {

/// `index` with what `indices` holds there in place of `dim`.
Shape picked(Shape index, const Array& indices, int dim) {
  if (index.dims() > 0) index[dim] = static_cast<int64_t>(indices(index));
  return index;
}

Row take_row(const Shape& x, int dim) {
  Shape one = x;
  one[dim] = 1;
  return {.name = "take_along, dim " + std::to_string(dim),
          .shapes = {{x, one}},
          .call = [=](const Tensors& x) { return take_along(x[0], x[1], dim); },
          .reference =
              [=](const Arrays& x) {
                return tabulate(x[1].shape,
                                [&](const Shape& i) { return x[0](picked(i, x[1], dim)); });
              },
          .operands = {{}, index_below(static_cast<double>(x[dim]))},
          .dtypes = kAll};
}
Row put_row(const Shape& y, int dim) {
  Shape one = y;
  one[dim] = 1;
  return {.name = "put_along, dim " + std::to_string(dim),
          .shapes = {{one, one}},
          .call = [=](const Tensors& x) { return put_along(x[0], x[1], dim, y); },
          .reference =
              [=](const Arrays& x) {
                Array result(y);
                for_each_index(x[0].shape,
                               [&](const Shape& i) { result(picked(i, x[1], dim)) = x[0](i); });
                return result;
              },
          .operands = {{}, index_below(static_cast<double>(y[dim]))},
          .dtypes = kAll};
}

Array cat_reference(const Arrays& x, int dim) {
  Shape shape = x[0].shape;
  shape[dim] = 0;
  for (const Array& part : x) shape[dim] += part.shape[dim];
  Array y(shape);
  int64_t start = 0;
  for (const Array& part : x) {
    for_each_index(part.shape, [&](const Shape& i) {
      Shape at = i;
      at[dim] += start;
      y(at) = part(i);
    });
    start += part.shape[dim];
  }
  return y;
}
Array stack_reference(const Arrays& x, int dim) {
  Shape shape = x[0].shape;
  shape.insert(dim, static_cast<int64_t>(x.size()));
  return tabulate(shape, [&](Shape i) {
    const Array& part = x[static_cast<size_t>(i[dim])];
    i.erase(dim);
    return part(i);
  });
}

/// Broadcasts three shapes.
Array where_reference(const Arrays& x) {
  Shape shape = broadcast_shapes("reference", x[1].shape, x[2].shape);
  shape = broadcast_shapes("reference", shape, x[0].shape);
  return tabulate(shape, [&](const Shape& i) { return x[0](i) != 0 ? x[1](i) : x[2](i); });
}

Row dropout_row(const std::string& name, double p, bool training) {
  constexpr uint64_t kSeed = 5;
  return {.name = name,
          .shapes = {{{4, 9}}, {{2, 3, 2, 3}}},
          .call =
              [=](const Tensors& x) {
                Generator generator({.seed = kSeed});
                return dropout(x[0], p, training, generator);
              },
          .reference =
              [=](const Arrays& x) {
                if (!training || p == 0) return x[0];
                Array y = x[0];
                const RandomKey key{.seed = kSeed};
                for (size_t i = 0; i < y.v.size(); ++i)
                  if (RandomKey::uniform(key.block(i / 4)[i % 4]) < p)
                    y.v[i] = 0;
                  else
                    y.v[i] /= 1 - p;
                return y;
              },
          .edges = {{Shape{}}, {{0, 3}}},
          .lengths = {{{17}}, {{5, 67}}},
          .large = {{300, 401}}};
}

}  // namespace

std::vector<Row> indexing_rows() {
  std::vector<Row> rows{take_row({3, 5}, 0), take_row({3, 5}, 1), take_row({2, 3, 2, 4}, 2),
                        put_row({3, 5}, 0),  put_row({3, 5}, 1),  put_row({2, 3, 2, 4}, 2)};
  rows[1].edges = {{{0, 5}, {0, 1}}};
  return rows;
}

std::vector<Row> join_rows() {
  std::vector<Row> rows;
  rows.push_back({.name = "cat, dim 0",
                  .shapes = {{{2, 3}, {1, 3}, {2, 3}}, {{4}, {2}}, {{2, 3, 2, 2}, {1, 3, 2, 2}}},
                  .call = [](const Tensors& x) { return cat(x, 0); },
                  .reference = [](const Arrays& x) { return cat_reference(x, 0); },
                  .edges = {{{0, 3}, {2, 3}}, {{0}, {0}}},
                  .large = {{200, 300}, {100, 300}},
                  .dtypes = kAll});
  rows.push_back(
      {.name = "cat, dim -1",
       .shapes = {{{2, 3}, {2, 1}}, {{2, 3, 2, 2}, {2, 3, 2, 1}}, {{3}}},
       .call = [](const Tensors& x) { return cat(x, -1); },
       .reference = [](const Arrays& x) { return cat_reference(x, x[0].shape.dims() - 1); },
       .edges = {{{2, 0}, {2, 3}}},
       .dtypes = kAll});
  rows.push_back({.name = "cat, channels",
                  .shapes = {{{2, 3, 2, 2}, {2, 1, 2, 2}}},
                  .call = [](const Tensors& x) { return cat(x, 1); },
                  .reference = [](const Arrays& x) { return cat_reference(x, 1); },
                  .dtypes = kAll});
  for (int dim : {0, 1})
    rows.push_back({.name = "stack, dim " + std::to_string(dim),
                    .shapes = {{{2, 3}, {2, 3}, {2, 3}}, {{4}, {4}}},
                    .call = [=](const Tensors& x) { return stack(x, dim); },
                    .reference = [=](const Arrays& x) { return stack_reference(x, dim); },
                    .edges = {{{0, 3}, {0, 3}}},
                    .dtypes = kAll});
  rows.push_back(
      {.name = "stack, dim -1",
       .shapes = {{{2, 3}, {2, 3}}, {{}, {}}},
       .call = [](const Tensors& x) { return stack(x, -1); },
       .reference = [](const Arrays& x) { return stack_reference(x, x[0].shape.dims()); },
       .dtypes = kAll});
  return rows;
}

std::vector<Row> choice_rows() {
  std::vector<Row> rows;
  rows.push_back({.name = "where",
                  .shapes = {{{3, 4}, {3, 4}, {3, 4}},
                             {{3, 1}, {4}, {3, 4}},
                             {{2, 3, 2, 2}, {2, 3, 2, 2}, {3, 1, 1}},
                             {{}, {3}, {2, 1}}},
                  .call = [](const Tensors& x) { return where(x[0], x[1], x[2]); },
                  .reference = where_reference,
                  .operands = {flag(), {}, {}},
                  .edges = {{{}, {}, {}}, {{0, 3}, {3}, {}}},
                  .large = {{300, 400}, {300, 400}, {400}},
                  .dtypes = kAll});
  const auto with_three = [](const Arrays& x, bool first) {
    const Array three({}, 3);
    return where_reference(first ? Arrays{x[0], three, x[1]} : Arrays{x[0], x[1], three});
  };
  const auto with_integer = [](DType t) { return t == DType::boolean ? DType::i64 : t; };
  rows.push_back({.name = "where, a number first",
                  .shapes = {{{3, 4}, {3, 4}}, {{3, 1}, {4}}},
                  .call = [](const Tensors& x) { return where(x[0], 3, x[1]); },
                  .reference = [=](const Arrays& x) { return with_three(x, true); },
                  .operands = {flag(), {}},
                  .dtypes = kAll,
                  .result = with_integer});
  rows.push_back({.name = "where, a number second",
                  .shapes = {{{3, 4}, {3, 4}}, {{3, 1}, {4}}},
                  .call = [](const Tensors& x) { return where(x[0], x[1], 3); },
                  .reference = [=](const Arrays& x) { return with_three(x, false); },
                  .operands = {flag(), {}},
                  .dtypes = kAll,
                  .result = with_integer});
  rows.push_back(dropout_row("dropout", 0.4, true));
  rows.push_back(dropout_row("dropout of nothing", 0, true));
  rows.push_back(dropout_row("dropout in evaluation", 0.4, false));
  return rows;
}

}  // namespace op_driver

// Values of the reference that random programs are compared with: arrays of double whose views are lists
// of indices into shared memory. Nothing here knows strides, dtypes, threads or derivatives.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

namespace plain {

using Shape = std::vector<int64_t>;

inline int64_t numel(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

struct Value {
  Shape shape;
  std::shared_ptr<std::vector<double>> memory;
  std::vector<size_t> index;  // of each element in memory, in row-major order
  bool dense = false;         // certainly row-major in the library too, so that view() must work

  double operator[](size_t i) const { return (*memory)[index[i]]; }
  int64_t size() const { return static_cast<int64_t>(index.size()); }
  int dim() const { return static_cast<int>(shape.size()); }
};

inline Value fresh(Shape shape, std::vector<double> elements) {
  Value v{std::move(shape), std::make_shared<std::vector<double>>(std::move(elements)), {}};
  v.index.resize(v.memory->size());
  std::iota(v.index.begin(), v.index.end(), size_t{0});
  return v;
}
inline std::vector<double> elements(const Value& v) {
  std::vector<double> all;
  for (size_t i = 0; i < v.index.size(); ++i) all.push_back(v[i]);
  return all;
}

/// The coordinates of element i of a shape.
inline Shape coordinates(const Shape& shape, int64_t i) {
  Shape c(shape.size());
  for (size_t d = shape.size(); d-- > 0; i /= shape[d]) c[d] = i % shape[d];
  return c;
}
inline int64_t position(const Shape& shape, const Shape& c) {
  int64_t i = 0;
  for (size_t d = 0; d < shape.size(); ++d) i = i * shape[d] + c[d];
  return i;
}

/// A view: element c of the result is element source(c) of v.
template <class F>
Value view(const Value& v, Shape shape, F source) {
  Value y{std::move(shape), v.memory, {}};
  for (int64_t i = 0; i < numel(y.shape); ++i)
    y.index.push_back(
        v.index[static_cast<size_t>(position(v.shape, source(coordinates(y.shape, i))))]);
  return y;
}
inline Value expand(const Value& v, const Shape& shape) {
  return view(v, shape, [&](Shape c) {
    c.erase(c.begin(), c.begin() + (static_cast<int>(shape.size()) - v.dim()));
    for (size_t d = 0; d < c.size(); ++d)
      if (v.shape[d] == 1) c[d] = 0;
    return c;
  });
}

inline bool broadcasts(const Shape& a, const Shape& b, Shape* out) {
  *out = Shape(std::max(a.size(), b.size()), 1);
  for (size_t d = 0; d < out->size(); ++d) {
    const size_t back = out->size() - d;
    const int64_t da = back > a.size() ? 1 : a[a.size() - back],
                  db = back > b.size() ? 1 : b[b.size() - back];
    if (da != db && da != 1 && db != 1) return false;
    (*out)[d] = da == 1 ? db : da;
  }
  return true;
}

template <class F>
Value map(const Value& v, F f) {
  std::vector<double> y;
  for (size_t i = 0; i < v.index.size(); ++i) y.push_back(f(v[i]));
  return fresh(v.shape, std::move(y));
}
template <class F>
Value zip(const Value& a, const Value& b, F f) {
  Shape shape;
  broadcasts(a.shape, b.shape, &shape);
  const Value wide_a = expand(a, shape), wide_b = expand(b, shape);
  std::vector<double> y;
  for (size_t i = 0; i < wide_a.index.size(); ++i) y.push_back(f(wide_a[i], wide_b[i]));
  return fresh(shape, std::move(y));
}

/// Replaces each slice along `dim` by f(slice), a list of the same length or of one element, which then
/// has size 1 there.
template <class F>
Value along(const Value& v, int dim, F f) {
  const auto d = static_cast<size_t>(dim);
  Shape outer = v.shape;
  outer[d] = 1;
  Shape shape = outer;
  std::vector<std::vector<double>> rows;
  for (int64_t i = 0; i < numel(outer); ++i) {
    Shape c = coordinates(outer, i);
    std::vector<double> row;
    for (c[d] = 0; c[d] < v.shape[d]; ++c[d])
      row.push_back(v[static_cast<size_t>(position(v.shape, c))]);
    rows.push_back(f(row));
    shape[d] = static_cast<int64_t>(rows.back().size());
  }
  std::vector<double> y(static_cast<size_t>(numel(shape)));
  for (int64_t i = 0; i < numel(outer); ++i) {
    Shape c = coordinates(outer, i);
    for (c[d] = 0; c[d] < shape[d]; ++c[d])
      y[static_cast<size_t>(position(shape, c))] =
          rows[static_cast<size_t>(i)][static_cast<size_t>(c[d])];
  }
  return fresh(shape, std::move(y));
}

/// [.., m, k] x [.., k, n], with batch dimensions that broadcast.
inline Value matmul(const Value& a, const Value& b) {
  const size_t da = a.shape.size(), db = b.shape.size();
  const int64_t m = a.shape[da - 2], k = a.shape[da - 1], n = b.shape[db - 1];
  Shape batch_a(a.shape.begin(), a.shape.end() - 2), batch_b(b.shape.begin(), b.shape.end() - 2);
  Shape batch;
  broadcasts(batch_a, batch_b, &batch);
  auto with = [&](int64_t rows, int64_t columns) {
    Shape s = batch;
    s.push_back(rows), s.push_back(columns);
    return s;
  };
  const Value wide_a = expand(a, with(m, k)), wide_b = expand(b, with(k, n));
  std::vector<double> y;
  for (int64_t i = 0; i < numel(batch); ++i)
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c) {
        double sum = 0;
        for (int64_t j = 0; j < k; ++j)
          sum += wide_a[static_cast<size_t>((i * m + r) * k + j)] *
                 wide_b[static_cast<size_t>((i * k + j) * n + c)];
        y.push_back(sum);
      }
  Value v = fresh(with(m, n), std::move(y));
  v.dense = true;
  return v;
}

/// Writes y, which broadcasts to v's shape, into v's elements.
inline void write(const Value& v, const Value& y) {
  const std::vector<double> all = elements(expand(y, v.shape));
  for (size_t i = 0; i < all.size(); ++i) (*v.memory)[v.index[i]] = all[i];
}

}  // namespace plain

// A row of the op driver: one op with one choice of arguments, the shapes it is tried on, and what
// it should compute, written as plain loops over long double. A row knows nothing of kernels,
// files or the op's gradient: op_driver_test.cpp derives every check from it. Rows stand by family
// in rows_*.cpp beside this file.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace op_driver {

using namespace lockstep;

/// Wide enough for every element of every dtype.
using Real = long double;

/// The elements of a tensor in row-major order.
struct Array {
  Shape shape;
  std::vector<Real> v;

  Array() = default;
  explicit Array(const Shape& shape, Real value = 0)
      : shape(shape), v(static_cast<size_t>(shape.numel()), value) {}
  /// The element at `index`, which may have more dimensions, and broadcasts.
  Real& operator()(const Shape& index) { return v[offset(index)]; }
  Real operator()(const Shape& index) const { return v[offset(index)]; }

 private:
  size_t offset(const Shape& index) const {
    int64_t at = 0;
    for (int d = 0; d < shape.dims(); ++d)
      at = at * shape[d] + (shape[d] == 1 ? 0 : index[index.dims() - shape.dims() + d]);
    return static_cast<size_t>(at);
  }
};

/// What a reference throws for inputs that the op should refuse with an Error.
struct Refused {};

using Tensors = std::vector<Tensor>;
using Arrays = std::vector<Array>;
using Shapes = std::vector<Shape>;
using Call = std::function<Tensor(const Tensors&)>;
using Reference = std::function<Array(const Arrays&)>;

/// What an operand may hold.
struct Operand {
  enum class Kind { real, index, flag };  // the row's dtype, i64, bool
  Kind kind = Kind::real;
  double low = -2, high = 2;   // an index: whole numbers in [low, high)
  bool special = true;         // infinities, NaN and extreme magnitudes make sense here
  bool huge = true;            // so do values near the largest number
  bool differentiable = true;  // real operands only
};
inline Operand index_below(double n) { return {.kind = Operand::Kind::index, .low = 0, .high = n}; }
inline Operand flag() { return {.kind = Operand::Kind::flag}; }

inline const std::vector<DType> kWide{DType::f32, DType::f64};
inline const std::vector<DType> kFloats{DType::f32, DType::f64, DType::f16, DType::bf16};
inline const std::vector<DType> kAll{DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64,
                                     DType::i32, DType::i16, DType::i8,  DType::u8,   DType::boolean};

inline DType same_dtype(DType t) { return t; }
inline DType total_dtype(DType t) { return is_floating(t) ? t : DType::i64; }
inline DType index_dtype(DType) { return DType::i64; }

struct Row {
  std::string name = {};            // begins with the function's name
  std::vector<Shapes> shapes = {};  // of the operands: small ones, for every check
  Call call = {};
  Reference reference = {};
  std::vector<Operand> operands = {};  // those not given are real
  std::vector<Shapes> edges = {};      // empty and 0-d ones
  std::vector<Shapes> lengths = {};    // around the lengths of vector registers
  Shapes large = {};                   // what several threads share; none: not tried
  std::vector<DType> dtypes = kFloats;
  std::function<DType(DType)> result = same_dtype;
  bool differentiable = true;
  std::vector<DType> huge = kWide;   // for which inputs near the largest number give what is right
  double slack = 1;                   // times the usual tolerance
  int ops = 1;                        // how often f16 and bf16 are rounded on the way
  bool first_wins = false;            // of equal elements the first gets the gradient

  Operand operand(size_t i) const { return i < operands.size() ? operands[i] : Operand(); }
};

/// The rows of each family.
std::vector<Row> reduction_rows();
std::vector<Row> softmax_rows();
std::vector<Row> loss_rows();
std::vector<Row> norm_rows();
std::vector<Row> convolution_rows();
std::vector<Row> product_rows();
std::vector<Row> indexing_rows();
std::vector<Row> view_rows();
std::vector<Row> join_rows();
std::vector<Row> choice_rows();
std::vector<Row> in_place_rows();

/// All of them.
std::vector<Row> all_rows();

// ---- loops that references share ----

/// Calls f(index) for each index of a shape, in row-major order.
template <class F>
void for_each_index(const Shape& shape, F f) {
  Shape index = Shape::filled(shape.dims(), 0);
  for (int64_t n = shape.numel(); n-- > 0;) {
    f(std::as_const(index));
    for (int d = shape.dims(); d-- > 0 && ++index[d] == shape[d];) index[d] = 0;
  }
}

/// An array of `shape` with f(index) at each index.
template <class F>
Array tabulate(const Shape& shape, F f) {
  Array y(shape);
  for_each_index(shape, [&](const Shape& index) { y(index) = f(index); });
  return y;
}

/// Dimensions made positive; none named means all.
inline std::vector<bool> chosen_dims(const Shape& shape, const Shape& dims) {
  std::vector<bool> chosen(static_cast<size_t>(shape.dims()), dims.empty());
  for (int64_t d : dims)
    if (shape.dims() > 0) chosen[static_cast<size_t>(d < 0 ? d + shape.dims() : d)] = true;
  return chosen;
}

/// f(the elements that differ in `dims` alone), in row-major order, for each of the others.
template <class F>
Array reduce(const Array& x, const Shape& dims, bool keepdim, F f) {
  const std::vector<bool> gone = chosen_dims(x.shape, dims);
  Shape kept = x.shape, without;
  for (int d = 0; d < x.shape.dims(); ++d) {
    if (gone[static_cast<size_t>(d)])
      kept[d] = 1;
    else
      without.push_back(x.shape[d]);
  }
  Array y(kept);
  std::vector<std::vector<Real>> slices(y.v.size());
  Array place = tabulate(kept, [n = 0](const Shape&) mutable { return Real(n++); });
  for_each_index(x.shape, [&](const Shape& index) {
    slices[static_cast<size_t>(place(index))].push_back(x(index));
  });
  for (size_t i = 0; i < slices.size(); ++i) y.v[i] = f(slices[i]);
  if (!keepdim) y.shape = without;
  return y;
}

/// Each slice along `dim` put in place of itself by f(std::vector<Real>&).
template <class F>
Array along(const Array& x, int dim, F f) {
  if (dim < 0) dim += x.shape.dims();
  Array y = x;
  if (x.shape.dims() == 0) {
    f(y.v);
    return y;
  }
  Shape starts = x.shape;
  starts[dim] = x.shape[dim] > 0 ? 1 : 0;
  for_each_index(starts, [&](Shape index) {
    std::vector<Real> slice;
    for (index[dim] = 0; index[dim] < x.shape[dim]; ++index[dim]) slice.push_back(x(index));
    f(slice);
    for (index[dim] = 0; index[dim] < x.shape[dim]; ++index[dim])
      y(index) = slice[static_cast<size_t>(index[dim])];
  });
  return y;
}

inline Real sum_of(const std::vector<Real>& v) {
  Real s = 0;
  for (Real x : v) s += x;
  return s;
}
/// The largest, or NaN where there is one.
inline Real max_of(const std::vector<Real>& v) {
  Real m = v[0];
  for (Real x : v) m = x != x || x > m ? x : m;
  for (Real x : v)
    if (x != x) m = x;
  return m;
}

}  // namespace op_driver

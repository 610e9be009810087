#include <lockstep/tensor/shape.h>

#include <algorithm>

namespace lockstep {

int64_t checked_numel(std::string_view op, const Shape& shape) {
  // Zeros count as ones first: the strides of an empty tensor must fit as well.
  int64_t n = 1;
  bool empty = false;
  for (int64_t d : shape) {
    LOCKSTEP_CHECK(d >= 0, ShapeError, op, ": negative size in shape ", shape);
    empty |= d == 0;
    LOCKSTEP_CHECK(d == 0 || !__builtin_mul_overflow(n, d, &n), ShapeError, op, ": shape ", shape,
                   " has more elements than 64 bits can count");
  }
  return empty ? 0 : n;
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = Shape::filled(shape.dims(), 1);
  for (int i = shape.dims() - 2; i >= 0; --i)
    strides[i] = strides[i + 1] * std::max<int64_t>(shape[i + 1], 1);
  return strides;
}

Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b) {
  Shape out = Shape::filled(std::max(a.dims(), b.dims()), 1);
  for (int i = 0; i < out.dims(); ++i) {
    const int ia = i - (out.dims() - a.dims()), ib = i - (out.dims() - b.dims());
    const int64_t da = ia < 0 ? 1 : a[ia], db = ib < 0 ? 1 : b[ib];
    LOCKSTEP_CHECK(da == db || da == 1 || db == 1, ShapeError, op, ": shapes ", a, " and ", b,
                   " do not broadcast: dimension ", i, " is ", da, " against ", db);
    out[i] = da == 1 ? db : da;
  }
  return out;
}

}  // namespace lockstep

#include <lockstep/tensor/shape.h>

#include <algorithm>

namespace lockstep {

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

// Views and copies of a tensor. A view's derivative is the inverse rearrangement of shape and
// strides, so each op's backward is one line beside it. In-place changes of views are in
// in_place.cpp.
#include <algorithm>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/copy.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {

void detail::become_view(const Tensor& y, const Tensor& x) {
  TensorBody& b = y.body();
  b.base = x.body().base ? x.body().base : x.ref();
  b.untracked_view = false;
  b.graph.store(b.base->graph.load(std::memory_order_acquire), std::memory_order_relaxed);
}

namespace {

/// A tensor that shares x's storage with another shape, strides and offset. In grad mode apply()
/// makes it a view of x, so that in-place ops on either reach the other's gradient.
Tensor alias(const Tensor& x, const Shape& shape, const Strides& strides, int64_t offset) {
  Tensor y = x.detach();
  TensorBody& b = y.body();
  b.shape = shape;
  b.strides = strides;
  b.offset = offset;
  b.untracked_view = true;
  return y;
}

/// The strides that view x as `shape` (same number of elements); false if that needs a copy.
bool view_strides(const Tensor& x, const Shape& shape, Strides* out) {
  *out = contiguous_strides(shape);
  if (x.numel() == 0) return true;
  // Runs of old dimensions that are dense in memory must cover runs of new dimensions exactly.
  int old_d = x.dim() - 1, new_d = shape.dims() - 1;
  while (old_d >= 0) {
    int64_t run = x.shape()[old_d], base = x.strides()[old_d];
    while (old_d > 0 &&
           (x.shape()[old_d - 1] == 1 || x.strides()[old_d - 1] == run * base || run == 1)) {
      if (run == 1) base = x.strides()[old_d - 1];
      run *= x.shape()[--old_d];
    }
    int64_t covered = 1;
    while (new_d >= 0 && (covered < run || shape[new_d] == 1)) {
      (*out)[new_d] = base * covered;
      covered *= shape[new_d--];
    }
    if (covered != run) return false;
    --old_d;
  }
  return true;
}

/// Fills in the one -1 of a shape.
Shape complete_shape(std::string_view op, Shape shape, const Tensor& x) {
  int hole = -1;
  int64_t known = 1;
  for (int i = 0; i < shape.dims(); ++i) {
    if (shape[i] == -1) {
      LOCKSTEP_CHECK(hole < 0, ShapeError, op, ": more than one -1 in ", shape);
      hole = i;
    } else {
      LOCKSTEP_CHECK(shape[i] >= 0, ShapeError, op, ": negative size in ", shape);
      LOCKSTEP_CHECK(!__builtin_mul_overflow(known, shape[i], &known), ShapeError, op, ": shape ",
                     shape, " has more elements than 64 bits can count");
    }
  }
  if (hole >= 0) {
    LOCKSTEP_CHECK(known > 0 && x.numel() % known == 0, ShapeError, op, ": a tensor of ", x.numel(),
                   " elements does not fill ", shape);
    shape[hole] = x.numel() / known;
  }
  LOCKSTEP_CHECK(checked_numel(op, shape) == x.numel(), ShapeError, op, ": shape ", x.shape(),
                 " has ", x.numel(), " elements, ", shape, " has ", shape.numel());
  return shape;
}

struct View {
  static constexpr const char* name = "view";
  static constexpr unsigned saves = 0;
  Shape shape;
  Shape from = {};
  Tensor forward(const Tensor& x) {
    from = x.shape();
    Strides strides;
    LOCKSTEP_CHECK(view_strides(x, shape, &strides), ShapeError, "view: shape ", x.shape(),
                   " with strides ", x.strides(), " cannot be viewed as ", shape,
                   " without a copy; use reshape");
    return alias(x, shape, strides, x.body().offset);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy.reshape(from));
  }
};

struct Permute {
  static constexpr const char* name = "permute";
  static constexpr unsigned saves = 0;
  Shape order;
  Tensor forward(const Tensor& x) {
    Shape shape, strides;
    for (int64_t d : order) {
      shape.push_back(x.shape()[static_cast<int>(d)]);
      strides.push_back(x.strides()[static_cast<int>(d)]);
    }
    return alias(x, shape, strides, x.body().offset);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    Shape inverse = order;
    for (int i = 0; i < order.dims(); ++i) inverse[static_cast<int>(order[i])] = i;
    dx.set(0, dy.permute(inverse));
  }
};

struct Expand {
  static constexpr const char* name = "expand";
  static constexpr unsigned saves = 0;
  Shape shape;
  Shape from = {};
  Tensor forward(const Tensor& x) {
    from = x.shape();
    const int lead = shape.dims() - x.dim();
    LOCKSTEP_CHECK(lead >= 0, ShapeError, "expand: ", x.shape(), " does not broadcast to ", shape);
    Strides strides = Shape::filled(shape.dims(), 0);
    for (int i = 0; i < x.dim(); ++i) {
      LOCKSTEP_CHECK(x.shape()[i] == shape[lead + i] || x.shape()[i] == 1, ShapeError,
                     "expand: ", x.shape(), " does not broadcast to ", shape);
      if (x.shape()[i] == shape[lead + i]) strides[lead + i] = x.strides()[i];
    }
    return alias(x, shape, strides, x.body().offset);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, sum_to(dy, from));
  }
};

/// y[i] = x[start + i * step] along one dimension; its transpose, SliceBackward, scatters into
/// zeros.
struct SliceOp {
  static constexpr const char* name = "slice";
  static constexpr unsigned saves = 0;
  int dim;
  int64_t start, length, step;
  Shape from = {};
  Tensor forward(const Tensor& x) {
    from = x.shape();
    Shape shape = x.shape(), strides = x.strides();
    shape[dim] = length;
    strides[dim] *= step;
    return alias(x, shape, strides, x.body().offset + start * x.strides()[dim]);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const;
};
struct SliceBackward {
  static constexpr const char* name = "slice_backward";
  static constexpr unsigned saves = 0;
  SliceOp slice;
  Tensor forward(const Tensor& dy) {
    Tensor dx = zeros(slice.from, {.dtype = dy.dtype(), .device = dy.device()});
    Tensor part = slice.forward(dx);
    part.copy_(dy);
    return dx;
  }
  void backward(const Saved&, const Tensor& ddx, InputGradients& out) const {
    out.set(0, apply(slice, ddx));
  }
};
void SliceOp::backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
  dx.set(0, apply(SliceBackward{*this}, dy));
}

struct Contiguous {
  static constexpr const char* name = "contiguous";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) {
    Tensor y = empty(x.shape(), {.dtype = x.dtype(), .device = x.device()});
    kernels::copy(y, x);
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const { dx.set(0, dy); }
};

struct Clone {
  static constexpr const char* name = "clone";
  static constexpr unsigned saves = 0;
  Tensor forward(const Tensor& x) {
    Tensor y = empty_like(x);
    kernels::copy(y, x);
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const { dx.set(0, dy); }
};

struct Convert {
  static constexpr const char* name = "to";
  static constexpr unsigned saves = 0;
  DType dtype;
  Tensor forward(const Tensor& x) const {
    Tensor y = x.is_channels_last()
                   ? empty_strided(x.shape(), x.strides(), {.dtype = dtype, .device = x.device()})
                   : empty(x.shape(), {.dtype = dtype, .device = x.device()});
    kernels::copy(y, x);
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy.to(dx.dtype(0)));
  }
};

/// A copy on another device. Between two devices that are not the CPU it goes through the CPU.
struct ToDevice {
  static constexpr const char* name = "to";
  static constexpr unsigned saves = 0;
  Device device;
  Device from;  // the input's
  Tensor forward(const Tensor& x) const {
    // Dense and in the order that empty_like gives: transfers move bytes.
    const Tensor source = x.is_contiguous() || x.is_channels_last() ? x : x.contiguous();
    const auto empty_on = [&](Device d) {
      return empty_strided(x.shape(), source.strides(), {.dtype = x.dtype(), .device = d});
    };
    if (x.device().is_cpu()) {
      const Tensor y = empty_on(device);
      kernels::upload(y, OnHost{source});
      return y;
    }
    const Tensor y = empty_on(Device());
    kernels::download(OnHost{y}, source);
    return device.is_cpu() ? y : forward(y);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, dy.to(from));
  }
};

}  // namespace

Tensor Tensor::view(const Shape& shape) const {
  return apply(View{complete_shape("view", shape, *this)}, *this);
}

Tensor Tensor::reshape(const Shape& shape) const {
  const Shape full = complete_shape("reshape", shape, *this);
  if (full == this->shape()) return *this;
  Strides strides;
  return view_strides(*this, full, &strides) ? view(full) : contiguous().view(full);
}

Tensor Tensor::flatten(int64_t start, int64_t end) const {
  const int a = wrap_dim("flatten", start, dim()), b = wrap_dim("flatten", end, dim());
  LOCKSTEP_CHECK(a <= b, IndexError, "flatten: start dimension ", start,
                 " comes after end dimension ", end);
  Shape shape;
  for (int i = 0; i < a; ++i) shape.push_back(this->shape()[i]);
  int64_t n = 1;
  for (int i = a; i <= b && i < dim(); ++i) n *= this->shape()[i];
  shape.push_back(n);
  for (int i = b + 1; i < dim(); ++i) shape.push_back(this->shape()[i]);
  return reshape(shape);
}

Tensor Tensor::permute(const Shape& order) const {
  Shape wrapped;
  unsigned seen = 0;
  LOCKSTEP_CHECK(order.dims() == dim(), ShapeError, "permute: ", order, " does not name each of ",
                 dim(), " dimensions");
  for (int64_t d : order) {
    const int w = wrap_dim("permute", d, dim());
    LOCKSTEP_CHECK(!(seen & 1u << w), ShapeError, "permute: dimension ", d, " is named twice in ",
                   order);
    seen |= 1u << w;
    wrapped.push_back(w);
  }
  return apply(Permute{wrapped}, *this);
}

Tensor Tensor::transpose(int64_t a, int64_t b) const {
  Shape order;
  for (int i = 0; i < dim(); ++i) order.push_back(i);
  const int p = wrap_dim("transpose", a, dim()), q = wrap_dim("transpose", b, dim());
  if (dim() > 0) std::swap(order[p], order[q]);
  return permute(order);
}

Tensor Tensor::squeeze(int64_t dim) const {
  const int d = wrap_dim("squeeze", dim, this->dim());
  if (this->dim() == 0 || shape()[d] != 1) return *this;
  Shape s = shape();
  s.erase(d);
  return view(s);
}
Tensor Tensor::unsqueeze(int64_t dim) const {
  Shape s = shape();
  s.insert(wrap_dim("unsqueeze", dim, this->dim() + 1), 1);
  return view(s);
}

Tensor Tensor::expand(const Shape& shape) const {
  Shape full = shape;  // -1 keeps a size, as in PyTorch
  for (int i = 0; i < full.dims(); ++i)
    if (const int own = i - (full.dims() - dim()); full[i] == -1 && own >= 0)
      full[i] = this->shape()[own];
  checked_numel("expand", full);
  return apply(Expand{full}, *this);
}

Tensor Tensor::slice(int64_t dim, Slice range) const {
  LOCKSTEP_CHECK(this->dim() > 0, ShapeError, "slice: a 0-d tensor cannot be sliced");
  const int d = wrap_dim("slice", dim, this->dim());
  LOCKSTEP_CHECK(range.step >= 1, ValueError, "slice: step must be at least 1, got ", range.step);
  const int64_t n = shape()[d];
  auto clip = [n](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + n : i, 0, n); };
  const int64_t start = clip(range.start), stop = std::max(clip(range.stop), start);
  const int64_t length = stop > start ? (stop - start - 1) / range.step + 1 : 0;
  // One element needs no step, and a large one would overflow the stride.
  return apply(SliceOp{d, start, length, length > 1 ? range.step : 1}, *this);
}

Tensor Tensor::narrow(int64_t dim, int64_t start, int64_t length) const {
  const int64_t n = size(dim);
  LOCKSTEP_CHECK(start >= 0 && length >= 0 && start <= n - length, IndexError, "narrow: start ",
                 start, " and length ", length, " go beyond dimension ", dim, " of shape ", shape());
  return slice(dim, {.start = start, .stop = start + length});
}

Tensor Tensor::select(int64_t dim, int64_t index) const {
  LOCKSTEP_CHECK(this->dim() > 0, ShapeError, "select: a 0-d tensor cannot be indexed");
  const int64_t n = size(dim);
  LOCKSTEP_CHECK(index >= -n && index < n, IndexError, "select: index ", index,
                 " is out of range for dimension ", dim, " of shape ", shape());
  return narrow(dim, index < 0 ? index + n : index, 1).squeeze(dim);
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : apply(Contiguous{}, *this); }
Tensor Tensor::clone() const { return apply(Clone{}, *this); }
Tensor Tensor::to(DType dtype) const {
  return dtype == this->dtype() ? *this : apply(Convert{dtype}, *this);
}
Tensor Tensor::to(Device device) const {
  if (device == this->device()) return *this;
  return apply(ToDevice{device, this->device()}, *this);
}

}  // namespace lockstep

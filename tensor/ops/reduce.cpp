#include <lockstep/tensor/ops/reduce.h>

#include <algorithm>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/take_along.h>

namespace lockstep {
namespace {

/// Which dimensions go: x's shape with size 1 there (`kept`), and without them (`without`).
struct Reduced {
  Shape kept, without;
  int64_t count = 1;  // elements behind each result

  Reduced(const char* op, const Tensor& x, const Shape& dims) {
    unsigned gone = dims.empty() ? ~0u : 0;
    for (int64_t d : dims) {
      const int w = wrap_dim(op, d, x.dim());
      LOCKSTEP_CHECK(!(gone & 1u << w), ValueError, op, ": dimension ", d, " is named twice in ",
                     dims);
      gone |= 1u << w;
    }
    for (int i = 0; i < x.dim(); ++i) {
      const int64_t n = x.shape()[i];
      if (gone & 1u << i)
        count *= n;
      else
        without.push_back(n);
      kept.push_back(gone & 1u << i ? 1 : n);
    }
  }
};

/// y = sum / divisor over the dimensions in which `kept` has size 1, seen as `shape`.
struct Sum {
  static constexpr const char* name = "sum";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = 0;
  Shape kept, shape;
  double divisor = 1;
  Shape from = {};
  Tensor forward(const Tensor& x) {
    from = x.shape();
    const DType dtype = is_floating(x.dtype()) ? x.dtype() : DType::i64;
    Tensor y = empty(kept, {.dtype = dtype, .device = x.device()});
    kernels::sum(y, x, divisor);
    return kept == shape ? y : y.view(shape);
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    const Tensor scaled = divisor == 1 ? dy : dy / divisor;
    dx.set(0, scaled.reshape(kept).expand(from));
  }
};

/// Beside the sum, whose size grows with the count, its precision differs.
struct Mean : Sum {
  static constexpr const char* name = "mean";
  static constexpr Precision precision = Precision::given;
};

struct Var {
  static constexpr const char* name = "var";
  static constexpr Precision precision = Precision::full;
  static constexpr unsigned saves = kInput(0);
  Shape kept, shape;
  double divisor;  // n - correction, at least 0
  Shape dims;
  Tensor forward(const Tensor& x) {
    Tensor y = empty(kept, {.dtype = x.dtype(), .device = x.device()});
    kernels::squared_deviations(y, x, divisor);
    return kept == shape ? y : y.view(shape);
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    // Halved, so that differences of the largest numbers fit; the mean of what is left corrects for
    // the rounding of the first.
    const Tensor x = saved.input(0), wide = x.to(compute_dtype(x.dtype()));
    const Tensor half = wide * 0.5, about_mean = half - mean(half, dims, true);
    const Tensor weight = dy.to(wide.dtype()).reshape(kept) * (4 / divisor);
    dx.set(0, ((about_mean - mean(about_mean, dims, true)) * weight).to(x.dtype()));
  }
};

/// The largest element of all; those that equal it (or are NaN, if it is) share the gradient.
struct MaxAll {
  static constexpr const char* name = "max";
  static constexpr unsigned saves = kInput(0) | kOutput;
  Tensor forward(const Tensor& x) {
    const Tensor flat = x.reshape({-1});
    return take_along(flat, argmax(flat, 0, true), 0).view({});
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    const Tensor x = saved.input(0).detach(), y = saved.output().detach();
    Tensor share;  // of x's shape, sums to 1
    {
      NoGradGuard guard;
      const Tensor same = where(ne(y, y), ne(x, x), eq(x, y)).to(x.dtype());
      share = same / sum(same);
    }
    dx.set(0, dy * share);
  }
};

}  // namespace

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) return x;
  const int lead = x.dim() - shape.dims();
  bool fits = lead >= 0;
  for (int i = 0; fits && i < shape.dims(); ++i)
    fits = shape[i] == 1 || shape[i] == x.shape()[lead + i];
  LOCKSTEP_CHECK(fits, ShapeError, "sum_to: ", shape, " does not broadcast to ", x.shape());
  Shape kept = Shape::filled(x.dim(), 1);
  for (int i = 0; i < shape.dims(); ++i) kept[lead + i] = shape[i];
  return apply(Sum{kept, shape}, x);
}

Tensor sum(const Tensor& x) { return apply(Sum{Shape::filled(x.dim(), 1), {}}, x); }
Tensor sum(const Tensor& x, const Shape& dims, bool keepdim) {
  const Reduced r("sum", x, dims);
  return apply(Sum{r.kept, keepdim ? r.kept : r.without}, x);
}

Tensor mean(const Tensor& x) { return mean(x, {}, false); }
Tensor mean(const Tensor& x, const Shape& dims, bool keepdim) {
  LOCKSTEP_CHECK(is_floating(x.dtype()), DTypeError, "mean: needs a floating tensor, got ",
                 x.dtype(), "; convert with to(DType::f32)");
  const Reduced r("mean", x, dims);
  return apply(Mean{{r.kept, keepdim ? r.kept : r.without, static_cast<double>(r.count)}}, x);
}

Tensor var(const Tensor& x, const Shape& dims, double correction, bool keepdim) {
  LOCKSTEP_CHECK(is_floating(x.dtype()), DTypeError, "var: needs a floating tensor, got ",
                 x.dtype(), "; convert with to(DType::f32)");
  const Reduced r("var", x, dims);
  const double divisor = std::max(0.0, static_cast<double>(r.count) - correction);
  return apply(Var{r.kept, keepdim ? r.kept : r.without, divisor, dims}, x);
}

Tensor max(const Tensor& x) {
  LOCKSTEP_CHECK(x.numel() > 0, ShapeError, "max: a tensor of shape ", x.shape(),
                 " has no largest element");
  return apply(MaxAll{}, x);
}

MaxResult max(const Tensor& x, int64_t dim, bool keepdim) {
  const int d = wrap_dim("max", dim, x.dim());
  const Tensor indices = argmax(x, d, true);
  const Tensor values = take_along(x, indices, d);
  if (keepdim || x.dim() == 0) return {values, indices};
  return {values.squeeze(d), indices.squeeze(d)};
}

Tensor argmax(const Tensor& x, int64_t dim, bool keepdim) {
  const int d = wrap_dim("argmax", dim, x.dim());
  if (x.dim() == 0) return zeros({}, {.dtype = DType::i64, .device = x.device()});
  LOCKSTEP_CHECK(x.shape()[d] > 0, ShapeError, "argmax: dimension ", dim, " of shape ", x.shape(),
                 " is empty and has no largest element");
  Shape kept = x.shape();
  kept[d] = 1;
  Tensor indices = empty(kept, {.dtype = DType::i64, .device = x.device()});
  kernels::argmax(indices, x, d);
  return keepdim ? indices : indices.squeeze(d);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, double)> sum("sum");
constinit Kernel<void(const Tensor&, const Tensor&, double)> squared_deviations("var");
constinit Kernel<void(const Tensor&, const Tensor&, int)> argmax("argmax");
}  // namespace kernels

Tensor Tensor::sum() const { return lockstep::sum(*this); }
Tensor Tensor::sum(const Shape& dims, bool keepdim) const {
  return lockstep::sum(*this, dims, keepdim);
}
Tensor Tensor::mean() const { return lockstep::mean(*this); }
Tensor Tensor::mean(const Shape& dims, bool keepdim) const {
  return lockstep::mean(*this, dims, keepdim);
}
Tensor Tensor::max() const { return lockstep::max(*this); }
Tensor Tensor::argmax(int64_t dim, bool keepdim) const {
  return lockstep::argmax(*this, dim, keepdim);
}

}  // namespace lockstep

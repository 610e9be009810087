#include <lockstep/tensor/ops/reduce.h>

#include <algorithm>
#include <tuple>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/symbol.h>
#include <lockstep/tensor/ops/take_along.h>

namespace lockstep {
namespace {

using namespace reductions;

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

/// A reduction over the dimensions in which `kept` has size 1, its result seen as `shape`.
template <class R>
struct ReductionOp {
  static constexpr const char* name = R::name;
  static constexpr Precision precision = R::precision;
  static constexpr unsigned saves = (reductions::reads<R> & Probe::kA ? kInput(0) : 0) |
                                    (reductions::reads<R> & Probe::kY ? kOutput : 0);
  Shape kept, shape;
  int64_t count;  // elements behind each result
  Shape from = {};

  Tensor forward(const Tensor& x) {
    from = x.shape();
    const bool widens = R::additive && !is_floating(x.dtype());
    const DType dtype = R::predicate ? DType::boolean : widens ? DType::i64 : x.dtype();
    const Tensor y = empty(kept, {.dtype = dtype, .device = x.device()});
    reduction_kernel<R>()(y, x);
    return kept == shape ? y : y.view(shape);
  }

  void backward(const Saved& saved, const Tensor& given_dy, InputGradients& dx) const {
    if constexpr (!R::predicate) {
      const DType computed = compute_dtype(given_dy.dtype());
      const Tensor dy = given_dy.reshape(kept).to(computed);
      Tensor x, y;  // where they are not read, dy stands for them
      if constexpr (saves & kInput(0)) x = saved.input(0).to(computed);
      if constexpr (saves & kOutput) y = saved.output().reshape(kept).to(computed);
      Tensor gradient;
      if constexpr (R::shares) {
        gradient = dy * share(x.detach(), y.detach());
      } else {
        const auto symbol = [&](const Tensor& t) { return Symbol(t.defined() ? t : dy); };
        gradient = R().dx(symbol(x), symbol(y), Symbol(dy), Symbol(static_cast<double>(count)))
                       .materialize(dy);
      }
      dx.set(0, gradient.expand(from).to(given_dy.dtype()));
    }
  }

  /// 1 over their number for the elements that equal the result (or are NaN, if it is), else 0.
  Tensor share(const Tensor& x, const Tensor& y) const {
    const NoGradGuard guard;
    const Tensor same = where(ne(y, y), ne(x, x), eq(x, y)).to(x.dtype());
    return same / sum_to(same, kept);
  }
};

template <class R>
Tensor reduce(const Tensor& x, const Shape& dims, bool keepdim) {
  LOCKSTEP_CHECK(R::domain == Domain::any || is_floating(x.dtype()), DTypeError, R::name,
                 ": needs a floating tensor, got ", x.dtype(), "; convert with to(DType::f32)");
  const Reduced r(R::name, x, dims);
  if constexpr (R::shares)
    LOCKSTEP_CHECK(r.count > 0, ShapeError, R::name, ": a tensor of shape ", x.shape(),
                   " has no largest or smallest element over ", dims.empty() ? "all" : "these",
                   " dimensions", dims.empty() ? std::string() : str_cat(" ", dims));
  return apply(ReductionOp<R>{r.kept, keepdim ? r.kept : r.without, r.count}, x);
}

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
  return apply(ReductionOp<Sum>{kept, shape, 1}, x);
}

Tensor sum(const Tensor& x) { return sum(x, {}, false); }
Tensor sum(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce<Sum>(x, dims, keepdim);
}
Tensor mean(const Tensor& x) { return mean(x, {}, false); }
Tensor mean(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce<Mean>(x, dims, keepdim);
}
Tensor norm(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce<Norm>(x, dims, keepdim);
}
Tensor amax(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce<Amax>(x, dims, keepdim);
}
Tensor amin(const Tensor& x, const Shape& dims, bool keepdim) {
  return reduce<Amin>(x, dims, keepdim);
}
Tensor any(const Tensor& x, const Shape& dims, bool keepdim) { return reduce<Any>(x, dims, keepdim); }
Tensor all(const Tensor& x, const Shape& dims, bool keepdim) { return reduce<All>(x, dims, keepdim); }

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
  return amax(x);
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

template <class R>
Kernel<void(const Tensor&, const Tensor&)>& reduction_kernel() {
  static constinit Kernel<void(const Tensor&, const Tensor&)> kernel(R::name);
  return kernel;
}
namespace {
template <class... R>
constexpr auto instantiate(List<R...>) {
  return std::tuple{&reduction_kernel<R>...};
}
[[gnu::used]] const auto instances = instantiate(reductions::Reductions());
}  // namespace

namespace kernels {
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

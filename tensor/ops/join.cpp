#include <lockstep/tensor/ops/join.h>

#include <algorithm>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/copy.h>

namespace lockstep {
namespace {

struct Cat {
  static constexpr const char* name = "cat";
  static constexpr Precision precision = Precision::widest;
  static constexpr unsigned saves = 0;
  int dim;
  DType dtype;
  Shape shape;
  struct Part {
    int64_t size;
    DType dtype;
  };
  std::vector<Part> parts = {};

  Tensor forward(std::span<const Tensor> tensors) {
    const TensorOptions options{.dtype = dtype, .device = tensors[0].device()};
    const bool channels_last = std::all_of(tensors.begin(), tensors.end(), [](const Tensor& x) {
      return x.is_channels_last() && !x.is_contiguous();
    });
    const Tensor y =
        channels_last
            ? empty({shape[0], shape[2], shape[3], shape[1]}, options).permute({0, 3, 1, 2})
            : empty(shape, options);
    int64_t start = 0;
    for (const Tensor& x : tensors) {
      parts.push_back({x.size(dim), x.dtype()});
      kernels::copy(y.narrow(dim, start, x.size(dim)), x);
      start += x.size(dim);
    }
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    int64_t start = 0;
    for (size_t i = 0; i < parts.size(); start += parts[i++].size)
      if (dx.needed(static_cast<int>(i)))
        dx.set(static_cast<int>(i), dy.narrow(dim, start, parts[i].size).to(parts[i].dtype));
  }
};

struct Stack {
  static constexpr const char* name = "stack";
  static constexpr Precision precision = Precision::widest;
  static constexpr unsigned saves = 0;
  int dim;
  DType dtype;
  std::vector<DType> dtypes = {};

  Tensor forward(std::span<const Tensor> tensors) {
    Shape shape = tensors[0].shape();
    shape.insert(dim, static_cast<int64_t>(tensors.size()));
    const Tensor y = empty(shape, {.dtype = dtype, .device = tensors[0].device()});
    for (size_t i = 0; i < tensors.size(); ++i) {
      dtypes.push_back(tensors[i].dtype());
      kernels::copy(y.select(dim, static_cast<int64_t>(i)), tensors[i]);
    }
    return y;
  }
  void backward(const Saved&, const Tensor& dy, InputGradients& dx) const {
    for (size_t i = 0; i < dtypes.size(); ++i)
      if (dx.needed(static_cast<int>(i)))
        dx.set(static_cast<int>(i), dy.select(dim, static_cast<int64_t>(i)).to(dtypes[i]));
  }
};

/// The common dtype.
DType common_dtype(const char* op, const std::vector<Tensor>& tensors) {
  LOCKSTEP_CHECK(!tensors.empty(), ValueError, op, ": needs at least one tensor");
  DType dtype = tensors[0].dtype();
  for (const Tensor& x : tensors) dtype = promote(dtype, x.dtype());
  return dtype;
}

}  // namespace

Tensor cat(const std::vector<Tensor>& tensors, int64_t dim) {
  const DType dtype = common_dtype("cat", tensors);
  Shape shape = tensors[0].shape();
  LOCKSTEP_CHECK(shape.dims() > 0, ShapeError,
                 "cat: a 0-d tensor has no dimension to join along; use stack");
  const int d = wrap_dim("cat", dim, shape.dims());
  shape[d] = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Shape others = tensors[i].shape();
    bool fits = others.dims() == shape.dims();
    if (fits) {
      others[d] = shape[d];
      fits = others == shape;
    }
    LOCKSTEP_CHECK(fits, ShapeError, "cat: tensors agree in all dimensions but ", d, "; tensor ", i,
                   " is ", tensors[i].shape(), ", tensor 0 is ", tensors[0].shape());
    shape[d] += tensors[i].shape()[d];
  }
  return apply_list(Cat{d, dtype, shape}, tensors);
}

Tensor stack(const std::vector<Tensor>& tensors, int64_t dim) {
  const DType dtype = common_dtype("stack", tensors);
  for (size_t i = 0; i < tensors.size(); ++i)
    LOCKSTEP_CHECK(tensors[i].shape() == tensors[0].shape(), ShapeError,
                   "stack: tensors have one shape; tensor ", i, " is ", tensors[i].shape(),
                   ", tensor 0 is ", tensors[0].shape());
  return apply_list(Stack{wrap_dim("stack", dim, tensors[0].dim() + 1), dtype}, tensors);
}

}  // namespace lockstep

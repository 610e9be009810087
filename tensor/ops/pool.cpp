#include <lockstep/tensor/ops/pool.h>

#include <algorithm>
#include <limits>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/channels_last.h>
#include <lockstep/tensor/ops/window_count.h>

namespace lockstep {
namespace {

/// A dense tensor in the memory order the indices were made for.
Tensor in_order(const Tensor& t, bool channels_last) {
  return channels_last ? detail::channels_last(t) : t.contiguous();
}
Tensor empty_in_order(const Shape& s, bool channels_last, const Tensor& like) {
  return channels_last ? detail::empty_channels_last(s, like)
                       : empty(s, {.dtype = like.dtype(), .device = like.device()});
}

/// The derivative of pooling picks winners; its transpose spreads to them. Each is the other's
/// derivative. `index` has one element for each of the output, in its memory order.
struct PoolGather {
  static constexpr const char* name = "max_pool2d_gather";
  static constexpr unsigned saves = kInput(1);
  PoolShape s;
  bool channels_last;
  Tensor forward(const Tensor& x, const Tensor& index) const {
    Tensor y = empty_in_order(s.y, channels_last, x);
    kernels::max_pool2d_gather(y, in_order(x, channels_last), index, s);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const;
};
struct PoolScatter {
  static constexpr const char* name = "max_pool2d_backward";
  static constexpr unsigned saves = kInput(1);
  PoolShape s;
  bool channels_last;
  Tensor forward(const Tensor& dy, const Tensor& index) const {
    Tensor dx = empty_in_order(s.x, channels_last, dy);
    kernels::max_pool2d_scatter(dx, in_order(dy, channels_last), index, s);
    return dx;
  }
  void backward(const Saved& saved, const Tensor& ddx, InputGradients& out) const {
    out.set(0, apply(PoolGather{s, channels_last}, ddx, saved.input(1)));
  }
};
void PoolGather::backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
  dx.set(0, apply(PoolScatter{s, channels_last}, dy, saved.input(1)));
}

struct MaxPool2d {
  static constexpr const char* name = "max_pool2d";
  static constexpr unsigned saves = 0;
  PoolShape s;
  bool channels_last = false;
  Tensor forward(Saver& saved, const Tensor& x) {
    channels_last = x.is_channels_last();
    const Tensor dense = in_order(x, channels_last);
    Tensor y = empty_in_order(s.y, channels_last, x);
    const Tensor index =
        empty({y.numel()},
              {.dtype = size_of(x.dtype()) <= 4 ? DType::i32 : DType::i64, .device = x.device()});
    kernels::max_pool2d(y, index, dense, s);
    saved.keep(0, index);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    dx.set(0, apply(PoolScatter{s, channels_last}, dy, saved.kept(0)));
  }
};

}  // namespace

Tensor max_pool2d(const Tensor& x, Size2d window, MaxPool2dOptions options) {
  const Size2d stride = options.stride.value_or(window), pad = options.padding;
  LOCKSTEP_CHECK(x.dim() == 4, ShapeError, "max_pool2d: the input must be [N, C, H, W], got ",
                 x.shape());
  LOCKSTEP_CHECK(window.h >= 1 && window.w >= 1 && stride.h >= 1 && stride.w >= 1, ValueError,
                 "max_pool2d: window and stride must be at least 1");
  LOCKSTEP_CHECK(pad.h >= 0 && pad.w >= 0 && pad.h <= window.h / 2 && pad.w <= window.w / 2,
                 ValueError, "max_pool2d: padding ", pad.h, "x", pad.w,
                 " is more than half of the window ", window.h, "x", window.w);
  const int64_t oh = detail::window_count("max_pool2d", x.size(2), window.h, stride.h, pad.h, 1),
                ow = detail::window_count("max_pool2d", x.size(3), window.w, stride.w, pad.w, 1);
  LOCKSTEP_CHECK(oh >= 1 && ow >= 1, ShapeError, "max_pool2d: the window ", window.h, "x", window.w,
                 " is larger than the padded input ", x.shape());
  LOCKSTEP_CHECK(x.size(2) > 0 && x.size(3) > 0, ShapeError, "max_pool2d: the images of ",
                 x.shape(), " have no pixels");
  const PoolShape s{.x = x.shape(),
                    .y = {x.size(0), x.size(1), oh, ow},
                    .kh = window.h,
                    .kw = window.w,
                    .stride_h = stride.h,
                    .stride_w = stride.w,
                    .pad_h = pad.h,
                    .pad_w = pad.w};
  LOCKSTEP_CHECK(std::min(s.kh, x.size(2)) <= std::numeric_limits<int32_t>::max() / s.row(),
                 ShapeError, "max_pool2d: the window ", window.h, "x", window.w, " over ", x.shape(),
                 " holds more than 2^31 - 1 elements");
  return apply(MaxPool2d{s}, x);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, PoolShape)> max_pool2d(
    "max_pool2d");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, PoolShape)> max_pool2d_scatter(
    "max_pool2d", "_scatter");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, PoolShape)> max_pool2d_gather(
    "max_pool2d", "_gather");
}  // namespace kernels

}  // namespace lockstep

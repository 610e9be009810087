#include <lockstep/tensor/ops/conv2d.h>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/channels_last.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/window_count.h>

namespace lockstep {
namespace {

using detail::channels_last, detail::empty_channels_last, detail::window_count;

// A convolution is linear in both operands, and the three products close under differentiation:
//   y = forward(x, w)        dx = data(dy, w)        dw = weights(x, dy)
// so the derivative of each is made of the other two.
Tensor forward(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor& bias);
Tensor data(const ConvShape& s, const Tensor& dy, const Tensor& w);
Tensor weights(const ConvShape& s, const Tensor& x, const Tensor& dy);

struct Conv2d {
  static constexpr const char* name = "conv2d";
  static constexpr Precision precision = Precision::lower;
  static constexpr unsigned saves_for(int i) {
    return i == 0 ? kInput(1) : i == 1 ? kInput(0) : 0;
  }
  ConvShape s;

  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& bias) const {
    Tensor y = empty_channels_last({s.n, s.o, s.oh, s.ow}, x);
    if (s.n == 0) return y;
    kernels::conv2d(y, channels_last(x), w.contiguous(),
                    bias.defined() ? bias.contiguous() : bias, s);
    return y;
  }

  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const {
    if (dx.needed(1) && is_grad_enabled()) {
      dx.set(1, weights(s, saved.input(0), dy));
    } else if (dx.needed(1)) {
      const Tensor given = dx.destination(1);
      const Tensor dw = given.defined() ? given : empty_weights(s, dy);
      run_weights(s, saved.input(0), dy, dw);
      dx.set(1, dw);
    }
    if (dx.needed(2)) dx.set(2, dy.sum({0, 2, 3}));
    if (dx.needed(0)) dx.set(0, data(s, dy, saved.input(1)));
  }

  static Tensor empty_weights(const ConvShape& s, const Tensor& like) {
    return empty({s.o, s.c / s.groups, s.kh, s.kw},
                 {.dtype = like.dtype(), .device = like.device()});
  }
  /// dw = the gradient of the weights, a sum over images: 0 for none.
  static void run_weights(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor dw) {
    if (s.n == 0) return void(dw.zero_());
    kernels::conv2d_backward_weights(dw, channels_last(x), channels_last(dy), s);
  }
};

struct ConvData {
  static constexpr const char* name = "conv2d_backward_data";
  static constexpr unsigned saves_for(int i) { return i == 0 ? kInput(1) : kInput(0); }
  ConvShape s;
  Tensor forward(const Tensor& dy, const Tensor& w) const {
    Tensor dx = empty_channels_last({s.n, s.c, s.h, s.w}, dy);
    if (s.n == 0) return dx;
    kernels::conv2d_backward_data(dx, channels_last(dy), w.contiguous(), s);
    return dx;
  }
  void backward(const Saved& saved, const Tensor& ddx, InputGradients& out) const {
    if (out.needed(0)) out.set(0, lockstep::forward(s, ddx, saved.input(1), Tensor()));
    if (out.needed(1)) out.set(1, weights(s, ddx, saved.input(0)));
  }
};

struct ConvWeights {
  static constexpr const char* name = "conv2d_backward_weights";
  static constexpr unsigned saves_for(int i) { return i == 0 ? kInput(1) : kInput(0); }
  ConvShape s;
  Tensor forward(const Tensor& x, const Tensor& dy) const {
    Tensor dw = Conv2d::empty_weights(s, x);
    Conv2d::run_weights(s, x, dy, dw);
    return dw;
  }
  void backward(const Saved& saved, const Tensor& ddw, InputGradients& out) const {
    if (out.needed(0)) out.set(0, data(s, saved.input(1), ddw));
    if (out.needed(1)) out.set(1, lockstep::forward(s, saved.input(0), ddw, Tensor()));
  }
};

Tensor forward(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor& bias) {
  return apply(Conv2d{s}, x, w, bias);
}
Tensor data(const ConvShape& s, const Tensor& dy, const Tensor& w) {
  return apply(ConvData{s}, dy, w);
}
Tensor weights(const ConvShape& s, const Tensor& x, const Tensor& dy) {
  return apply(ConvWeights{s}, x, dy);
}

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, Conv2dOptions o) {
  LOCKSTEP_CHECK(x.dim() == 4, ShapeError, "conv2d: the input must be [N, C, H, W], got ",
                 x.shape(), x.dim() == 3 ? "; add a batch dimension with unsqueeze(0)" : "");
  LOCKSTEP_CHECK(weight.dim() == 4, ShapeError,
                 "conv2d: the weight must be [O, C / groups, kh, kw], got ", weight.shape());
  LOCKSTEP_CHECK(o.groups >= 1 && x.size(1) % o.groups == 0 && weight.size(0) % o.groups == 0,
                 ShapeError, "conv2d: ", o.groups, " groups do not divide ", x.size(1),
                 " input and ", weight.size(0), " output channels");
  LOCKSTEP_CHECK(x.size(1) == weight.size(1) * o.groups, ShapeError, "conv2d: input has ",
                 x.size(1), " channels but the weight ", weight.shape(), " expects ",
                 weight.size(1) * o.groups);
  LOCKSTEP_CHECK(x.dtype() == weight.dtype(), DTypeError, "conv2d: the input is ", x.dtype(),
                 ", the weight ", weight.dtype(), "; convert one with to()");
  LOCKSTEP_CHECK(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), ShapeError,
                 "conv2d: the bias must be [", weight.size(0), "], got ",
                 bias.defined() ? bias.shape() : Shape{});
  LOCKSTEP_CHECK(!bias.defined() || bias.dtype() == x.dtype(), DTypeError, "conv2d: the input is ",
                 x.dtype(), ", the bias ", bias.dtype(), "; convert one with to()");
  LOCKSTEP_CHECK(weight.numel() > 0, ShapeError, "conv2d: the weight ", weight.shape(),
                 " is empty");
  LOCKSTEP_CHECK(o.stride.h >= 1 && o.stride.w >= 1 && o.dilation.h >= 1 && o.dilation.w >= 1 &&
                     o.padding.h >= 0 && o.padding.w >= 0,
                 ValueError, "conv2d: stride and dilation must be at least 1, padding at least 0");
  const auto out = [](int64_t size, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
    return window_count("conv2d", size, kernel, stride, pad, dilation);
  };
  const ConvShape s{.n = x.size(0),
                    .c = x.size(1),
                    .h = x.size(2),
                    .w = x.size(3),
                    .o = weight.size(0),
                    .oh = out(x.size(2), weight.size(2), o.stride.h, o.padding.h, o.dilation.h),
                    .ow = out(x.size(3), weight.size(3), o.stride.w, o.padding.w, o.dilation.w),
                    .kh = weight.size(2),
                    .kw = weight.size(3),
                    .stride_h = o.stride.h,
                    .stride_w = o.stride.w,
                    .pad_h = o.padding.h,
                    .pad_w = o.padding.w,
                    .dilation_h = o.dilation.h,
                    .dilation_w = o.dilation.w,
                    .groups = o.groups};
  LOCKSTEP_CHECK(s.oh >= 1 && s.ow >= 1, ShapeError, "conv2d: the kernel ", weight.size(2), "x",
                 weight.size(3), " is larger than the padded input ", x.shape());
  LOCKSTEP_CHECK(s.h > 0 && s.w > 0, ShapeError, "conv2d: the images of ", x.shape(),
                 " have no pixels");
  return forward(s, x, weight, bias);
}

namespace kernels {
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, ConvShape)>
    conv2d("conv2d");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, ConvShape)>
    conv2d_backward_data("conv2d", "_backward_data");
constinit Kernel<void(const Tensor&, const Tensor&, const Tensor&, ConvShape)>
    conv2d_backward_weights("conv2d", "_backward_weights");
}  // namespace kernels

}  // namespace lockstep

#include <lockstep/tensor/ops/pool.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include <lockstep/tensor/op.h>
#include <lockstep/tensor/ops/channels_last.h>
#include <lockstep/tensor/ops/window_count.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

struct PoolShape {
  Shape x, y;
  int64_t kh, kw, stride_h, stride_w, pad_h, pad_w;

  /// The part of a window that is inside the image.
  struct Window {
    int64_t y0, x0, y1, x1;
  };
  Window window(int64_t oy, int64_t ox) const {
    const int64_t top = oy * stride_h - pad_h, left = ox * stride_w - pad_w;
    return {std::max<int64_t>(top, 0), std::max<int64_t>(left, 0),
            x[2] - top > kh ? top + kh : x[2], x[3] - left > kw ? left + kw : x[3]};
  }
  /// Elements of a row of such a part, at most.
  int64_t row() const { return std::min(kw, x[3]); }
};

/// Images of rows of pixels of channels: [N, H, W, C] for channels-last, [N C, H, W, 1] for
/// row-major.
struct Layout {
  int64_t images, channels;
  Layout(const PoolShape& s, bool channels_last)
      : images(channels_last ? s.x[0] : s.x[0] * s.x[1]), channels(channels_last ? s.x[1] : 1) {}
};

/// Which element of its window won, as wide as a T of four or eight bytes so that both fit the same
/// vector lanes. It counts within the part of the window that is inside the image at the top left,
/// min(kh, h) rows of min(kw, w) elements.
template <class T>
using Index = std::conditional_t<sizeof(T) <= 4, int32_t, int64_t>;
template <class T>
Index<T>* indices(const Tensor& t) {
  return static_cast<Index<T>*>(t.data_ptr());
}

/// Calls f(first channel of the output pixel, y, x of its window's corner) for each output pixel,
/// one block of images to a thread.
template <class F>
void for_each_window(const PoolShape& s, const Layout& layout, F f) {
  const int64_t oh = s.y[2], ow = s.y[3];
  const int64_t block = std::max<int64_t>(1, (layout.images + 7) / 8);
  parallel_for(layout.images, block, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) f(n, oh, ow);
  });
}

void pool_forward_cpu(const PoolShape& s, const Tensor& x, const Tensor& y, const Tensor& index) {
  const Layout layout(s, x.is_channels_last());
  const int64_t h = s.x[2], w = s.x[3], c = layout.channels;
  dispatch("max_pool2d", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_window(s, layout, [&](int64_t n, int64_t oh, int64_t ow) {
      const T* image = x.data<T>() + n * h * w * c;
      T* out = y.data<T>() + n * oh * ow * c;
      Index<T>* won = indices<T>(index) + n * oh * ow * c;
      for (int64_t oy = 0; oy < oh; ++oy)
        for (int64_t ox = 0; ox < ow; ++ox, out += c, won += c) {
          const PoolShape::Window in = s.window(oy, ox);
          bool first = true;
          for (int64_t y = in.y0; y < in.y1; ++y)
            for (int64_t x = in.x0; x < in.x1; ++x) {
              const T* __restrict v = image + (y * w + x) * c;
              T* __restrict best = out;
              Index<T>* __restrict at = won;
              const auto k = static_cast<Index<T>>((y - in.y0) * s.row() + x - in.x0);
              if (std::exchange(first, false)) {
                for (int64_t i = 0; i < c; ++i) best[i] = v[i], at[i] = k;
              } else {
                for (int64_t i = 0; i < c; ++i) {
                  const bool larger = (v[i] > best[i]) | (v[i] != v[i]);
                  best[i] = larger ? v[i] : best[i];
                  at[i] = larger ? k : at[i];
                }
              }
            }
        }
    });
  });
}

/// dx = 0 but at the winners, where it is the sum of the dy they won.
void pool_scatter_cpu(const PoolShape& s, const Tensor& dy, const Tensor& index, const Tensor& dx) {
  const Layout layout(s, dx.is_channels_last());
  const int64_t h = s.x[2], w = s.x[3], c = layout.channels;
  // Windows that tile the image write each element once; others add into zeros.
  const bool tiled = s.kh == s.stride_h && s.kw == s.stride_w && s.pad_h == 0 && s.pad_w == 0 &&
                     s.y[2] * s.kh == h && s.y[3] * s.kw == w;
  dispatch_floating("max_pool2d", dy.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_window(s, layout, [&](int64_t n, int64_t oh, int64_t ow) {
      T* image = dx.data<T>() + n * h * w * c;
      const T* arriving = dy.data<T>() + n * oh * ow * c;
      const Index<T>* won = indices<T>(index) + n * oh * ow * c;
      if (!tiled) std::fill_n(image, h * w * c, T(0));
      for (int64_t oy = 0; oy < oh; ++oy)
        for (int64_t ox = 0; ox < ow; ++ox, arriving += c, won += c) {
          const PoolShape::Window in = s.window(oy, ox);
          for (int64_t y = in.y0; y < in.y1; ++y)
            for (int64_t x = in.x0; x < in.x1; ++x) {
              T* __restrict to = image + (y * w + x) * c;
              const T* __restrict from = arriving;
              const Index<T>* __restrict at = won;
              const auto k = static_cast<Index<T>>((y - in.y0) * s.row() + x - in.x0);
              // `from` is read in any case: a conditional load would keep this from vector code.
              if (tiled) {
                for (int64_t i = 0; i < c; ++i) {
                  const T v = from[i];
                  to[i] = at[i] == k ? v : T(0);
                }
              } else {
                for (int64_t i = 0; i < c; ++i) {
                  const T v = from[i];
                  to[i] += at[i] == k ? v : T(0);
                }
              }
            }
        }
    });
  });
}

/// y = the winners' elements of x: the transpose of scatter.
void pool_gather_cpu(const PoolShape& s, const Tensor& x, const Tensor& index, const Tensor& y) {
  const Layout layout(s, x.is_channels_last());
  const int64_t h = s.x[2], w = s.x[3], c = layout.channels;
  dispatch_floating("max_pool2d", x.dtype(), [&]<class T>(TypeTag<T>) {
    for_each_window(s, layout, [&](int64_t n, int64_t oh, int64_t ow) {
      const T* image = x.data<T>() + n * h * w * c;
      for (int64_t oy = 0; oy < oh; ++oy)
        for (int64_t ox = 0; ox < ow; ++ox) {
          const PoolShape::Window in = s.window(oy, ox);
          for (int64_t i = 0; i < c; ++i) {
            const int64_t o = ((n * oh + oy) * ow + ox) * c + i, k = indices<T>(index)[o];
            const int64_t row = in.y0 + k / s.row(), column = in.x0 + k % s.row();
            y.data<T>()[o] = image[(row * w + column) * c + i];
          }
        }
    });
  });
}

/// A dense tensor in the memory order the indices were made for.
Tensor in_order(const Tensor& t, bool channels_last) {
  return channels_last ? detail::channels_last(t) : t.contiguous();
}
Tensor empty_in_order(const Shape& s, bool channels_last, const Tensor& like) {
  return channels_last ? detail::empty_channels_last(s, like)
                       : empty(s, {.dtype = like.dtype(), .device = like.device()});
}

using PoolKernel = Kernel<void(const PoolShape&, const Tensor&, const Tensor&, const Tensor&)>;

/// The derivative of pooling picks winners; its transpose spreads to them. Each is the other's
/// derivative. `index` has one element for each of the output, in its memory order.
struct PoolGather {
  static constexpr const char* name = "max_pool2d_gather";
  static constexpr unsigned saves = kInput(1);
  static inline PoolKernel kernel{"max_pool2d", pool_gather_cpu};
  PoolShape s;
  bool channels_last;
  Tensor forward(const Tensor& x, const Tensor& index) const {
    Tensor y = empty_in_order(s.y, channels_last, x);
    kernel.on(x.device())(s, in_order(x, channels_last), index, y);
    return y;
  }
  void backward(const Saved& saved, const Tensor& dy, InputGradients& dx) const;
};
struct PoolScatter {
  static constexpr const char* name = "max_pool2d_backward";
  static constexpr unsigned saves = kInput(1);
  static inline PoolKernel kernel{"max_pool2d", pool_scatter_cpu};
  PoolShape s;
  bool channels_last;
  Tensor forward(const Tensor& dy, const Tensor& index) const {
    Tensor dx = empty_in_order(s.x, channels_last, dy);
    kernel.on(dy.device())(s, in_order(dy, channels_last), index, dx);
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
  static inline Kernel<void(const PoolShape&, const Tensor&, const Tensor&, const Tensor&)> kernel{
      "max_pool2d", pool_forward_cpu};
  PoolShape s;
  bool channels_last = false;
  Tensor forward(Saver& saved, const Tensor& x) {
    channels_last = x.is_channels_last();
    const Tensor dense = in_order(x, channels_last);
    Tensor y = empty_in_order(s.y, channels_last, x);
    const Tensor index =
        empty({y.numel()},
              {.dtype = size_of(x.dtype()) <= 4 ? DType::i32 : DType::i64, .device = x.device()});
    kernel.on(x.device())(s, dense, y, index);
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

}  // namespace lockstep

// max_pool2d on the CPU: channels-last images a pixel of channels at a time.
#include <algorithm>
#include <type_traits>
#include <utility>

#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/ops/pool.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep {
namespace {

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

void max_pool2d_cpu(const Tensor& y, const Tensor& index, const Tensor& x, PoolShape s) {
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
void scatter_cpu(const Tensor& dx, const Tensor& dy, const Tensor& index, PoolShape s) {
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
void gather_cpu(const Tensor& y, const Tensor& x, const Tensor& index, PoolShape s) {
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

const bool entered = kernels::max_pool2d.set(DeviceType::cpu, cpu::Widened<max_pool2d_cpu, 2>::run, dtypes::kAll) &&
                     kernels::max_pool2d_scatter.set(DeviceType::cpu, cpu::Widened<scatter_cpu, 1>::run, dtypes::kFloating) &&
                     kernels::max_pool2d_gather.set(DeviceType::cpu, cpu::Widened<gather_cpu, 1>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep

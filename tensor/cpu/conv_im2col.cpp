// Convolution as matrix products: the patches under the kernel, one row per output pixel, times the
// weights.
//   columns [H' W', kh kw C],  weights [O, kh kw C]:
//   y = columns w^T,  dcolumns = dy w,  dw = dy^T columns
#include <algorithm>
#include <vector>

#include <lockstep/tensor/cpu/block_sums.h>
#include <lockstep/tensor/cpu/conv.h>
#include <lockstep/tensor/cpu/gemm.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::cpu {
namespace {

/// Calls f(column element, image element or -1 in the padding) for runs of C/groups channels.
template <class F>
void for_each_patch(const ConvShape& s, int64_t group, F f) {
  const int64_t cg = s.c / s.groups;
  int64_t column = 0;
  for (int64_t oy = 0; oy < s.oh; ++oy)
    for (int64_t ox = 0; ox < s.ow; ++ox)
      for (int64_t ky = 0; ky < s.kh; ++ky)
        for (int64_t kx = 0; kx < s.kw; ++kx, column += cg) {
          const int64_t y = oy * s.stride_h - s.pad_h + ky * s.dilation_h;
          const int64_t x = ox * s.stride_w - s.pad_w + kx * s.dilation_w;
          const bool inside = y >= 0 && y < s.h && x >= 0 && x < s.w;
          f(column, inside ? (y * s.w + x) * s.c + group * cg : -1);
        }
}

/// Weights [O, C/groups, kh, kw] as [O, kh, kw, C/groups], and back.
template <class T>
std::vector<T> to_columns_order(const ConvShape& s, const T* w) {
  std::vector<T> out(static_cast<size_t>(s.weights()));
  const int64_t cg = s.c / s.groups, k = s.kh * s.kw;
  for (int64_t o = 0; o < s.o; ++o)
    for (int64_t c = 0; c < cg; ++c)
      for (int64_t i = 0; i < k; ++i)
        out[static_cast<size_t>((o * k + i) * cg + c)] = w[(o * cg + c) * k + i];
  return out;
}
template <class T>
void from_columns_order(const ConvShape& s, const T* in, T* w) {
  const int64_t cg = s.c / s.groups, k = s.kh * s.kw;
  for (int64_t o = 0; o < s.o; ++o)
    for (int64_t c = 0; c < cg; ++c)
      for (int64_t i = 0; i < k; ++i) w[(o * cg + c) * k + i] = in[(o * k + i) * cg + c];
}

template <class T>
void gather(const ConvShape& s, int64_t group, const T* image, std::vector<T>& columns) {
  const int64_t cg = s.c / s.groups;
  for_each_patch(s, group, [&](int64_t column, int64_t element) {
    if (element < 0)
      std::fill_n(columns.data() + column, cg, T(0));
    else
      std::copy_n(image + element, cg, columns.data() + column);
  });
}

struct Sizes {
  int64_t pixels, patch, og;  // output pixels, elements of a patch, output channels of a group
  explicit Sizes(const ConvShape& s)
      : pixels(s.oh * s.ow), patch(s.kh * s.kw * (s.c / s.groups)), og(s.o / s.groups) {}
};

}  // namespace

void im2col_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias,
                    const ConvShape& s) {
  const Sizes z(s);
  dispatch_floating("conv2d", x.dtype(), [&]<class T>(TypeTag<T>) {
    const std::vector<T> weights = to_columns_order(s, w.data<T>());
    parallel_for(s.n, images_per_block(s), [&](int64_t begin, int64_t end) {
      std::vector<T> columns(static_cast<size_t>(z.pixels * z.patch));
      for (int64_t n = begin; n < end; ++n)
        for (int64_t g = 0; g < s.groups; ++g) {
          gather(s, g, x.data<T>() + n * s.x_image(), columns);
          gemm<T>(z.pixels, z.og, z.patch, {columns.data(), z.patch, false},
                  {weights.data() + g * z.og * z.patch, z.patch, true},
                  y.data<T>() + n * s.y_image() + g * z.og, s.o, false,
                  {bias.defined() ? bias.data<T>() + g * z.og : nullptr, false});
        }
    });
  });
}

void im2col_backward_data(const Tensor& dx, const Tensor& dy, const Tensor& w, const ConvShape& s) {
  const Sizes z(s);
  dispatch_floating("conv2d", dy.dtype(), [&]<class T>(TypeTag<T>) {
    const std::vector<T> weights = to_columns_order(s, w.data<T>());
    parallel_for(s.n, images_per_block(s), [&](int64_t begin, int64_t end) {
      std::vector<T> columns(static_cast<size_t>(z.pixels * z.patch));
      for (int64_t n = begin; n < end; ++n) {
        T* image = dx.data<T>() + n * s.x_image();
        std::fill_n(image, s.x_image(), T(0));
        for (int64_t g = 0; g < s.groups; ++g) {
          gemm<T>(z.pixels, z.patch, z.og, {dy.data<T>() + n * s.y_image() + g * z.og, s.o, false},
                  {weights.data() + g * z.og * z.patch, z.patch, false}, columns.data(), z.patch);
          for_each_patch(s, g, [&](int64_t column, int64_t element) {
            if (element < 0) return;
            for (int64_t c = 0; c < s.c / s.groups; ++c)
              image[element + c] += columns[static_cast<size_t>(column + c)];
          });
        }
      }
    });
  });
}

void im2col_backward_weights(const Tensor& dw, const Tensor& x, const Tensor& dy,
                             const ConvShape& s) {
  const Sizes z(s);
  dispatch_floating("conv2d", x.dtype(), [&]<class T>(TypeTag<T>) {
    const int64_t block = images_per_sum(s), blocks = (s.n + block - 1) / block;
    std::vector<T> sum(static_cast<size_t>(s.weights()));
    sum_blocks(blocks, s.weights(), sum.data(), [&](int64_t b, T* out) {
      std::fill_n(out, s.weights(), T(0));
      std::vector<T> columns(static_cast<size_t>(z.pixels * z.patch));
      for (int64_t n = b * block; n < std::min(s.n, (b + 1) * block); ++n)
        for (int64_t g = 0; g < s.groups; ++g) {
          gather(s, g, x.data<T>() + n * s.x_image(), columns);
          gemm<T>(z.og, z.patch, z.pixels,
                  {dy.data<T>() + n * s.y_image() + g * z.og, s.o, true},
                  {columns.data(), z.patch, false}, out + g * z.og * z.patch, z.patch, true);
        }
    });
    from_columns_order(s, sum.data(), dw.data<T>());
  });
}

}  // namespace lockstep::cpu

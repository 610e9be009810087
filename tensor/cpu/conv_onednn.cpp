// Convolution by oneDNN's generated code: channels-last activations, weights in whatever order
// oneDNN prefers (reordered once per call), primitives kept by shape. Each block of images is one
// single-threaded execution.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include <lockstep/tensor/cpu/block_sums.h>
#include <lockstep/tensor/cpu/conv.h>
#include <lockstep/tensor/cpu/onednn.h>
#include <lockstep/tensor/cpu/widened.h>
#include <lockstep/tensor/parallel.h>

namespace lockstep::cpu {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;

enum class Product { forward, data, weights };

/// One compiled product of one shape.
struct Compiled {
  dnnl::primitive primitive;
  memory::desc x, w, bias, y;
};

memory::desc desc(memory::dims dims, Tag tag) {
  return {std::move(dims), memory::data_type::f32, tag};
}
memory::desc weights(const ConvShape& s, Tag ungrouped, Tag grouped) {
  return s.groups == 1 ? desc({s.o, s.c, s.kh, s.kw}, ungrouped)
                       : desc({s.groups, s.o / s.groups, s.c / s.groups, s.kh, s.kw}, grouped);
}
memory::desc plain_weights(const ConvShape& s) { return weights(s, Tag::oihw, Tag::goihw); }

/// What the last window reaches beyond the image: less than pad_h where a stride leaves rows over, and
/// in a part of an image.
int64_t padding_below(const ConvShape& s) {
  const int64_t reached = (s.oh - 1) * s.stride_h - s.pad_h + s.dilation_h * (s.kh - 1) + 1;
  return std::max<int64_t>(reached - s.h, 0);
}

Compiled compile(Product product, const ConvShape& s, bool with_bias) {
  using Forward = dnnl::convolution_forward;
  using Data = dnnl::convolution_backward_data;
  using Weights = dnnl::convolution_backward_weights;
  const memory::dims strides{s.stride_h, s.stride_w}, dilates{s.dilation_h - 1, s.dilation_w - 1},
      pad{s.pad_h, s.pad_w}, pad_end{padding_below(s), s.pad_w};
  const auto x = desc({s.n, s.c, s.h, s.w}, Tag::nhwc), y = desc({s.n, s.o, s.oh, s.ow}, Tag::nhwc);
  const auto w = weights(s, Tag::any, Tag::any);
  const auto bias = with_bias ? desc({s.o}, Tag::x) : memory::desc();  // an empty one: no bias
  const auto direct = dnnl::algorithm::convolution_direct;
  const auto forward = forward_desc<Forward>(dnnl::prop_kind::forward_training, direct, x, w, bias,
                                             y, strides, dilates, pad, pad_end);
  if (product == Product::forward)
    return {Forward(forward), forward.src_desc(), forward.weights_desc(), bias, forward.dst_desc()};
  if (product == Product::data) {
    const auto p = backward_desc<Data>(forward, direct, x, w, y, strides, dilates, pad, pad_end);
    return {Data(p), p.diff_src_desc(), p.weights_desc(), {}, p.diff_dst_desc()};
  }
  const auto p = backward_desc<Weights>(forward, direct, x, w, bias, y, strides, dilates, pad, pad_end);
  return {Weights(p), p.src_desc(), p.diff_weights_desc(), bias, p.diff_dst_desc()};
}

struct Key {
  Product product;
  bool with_bias;
  ConvShape shape;
  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& k) const {
    const ConvShape& s = k.shape;
    size_t h = static_cast<size_t>(k.product) * 2 + k.with_bias;
    for (int64_t v : {s.n, s.c, s.h, s.w, s.o, s.oh, s.ow, s.kh, s.kw, s.stride_h, s.stride_w,
                      s.pad_h, s.pad_w, s.dilation_h, s.dilation_w, s.groups})
      h = h * 1000003 + static_cast<size_t>(v);
    return h;
  }
};

/// Compiled once per thread and shape; oneDNN shares the generated code between threads itself.
const Compiled& compiled(Product product, const ConvShape& s, bool with_bias) {
  thread_local std::unordered_map<Key, Compiled, Hash> cache;
  const Key key{product, with_bias, s};
  if (auto it = cache.find(key); it != cache.end()) return it->second;
  if (cache.size() >= 512) cache.clear();  // a program of ever new shapes
  return cache.emplace(key, compile(product, s, with_bias)).first->second;
}

memory wrap(const memory::desc& d, const void* data) {
  return memory(d, engine(), const_cast<void*>(data));
}

void reorder(memory from, memory to) {
  dnnl::reorder(from, to).execute(stream(), from, to);
  stream().wait();
}

/// The weights of a call in the order that blocks of this many images read.
Tensor prepared_weights(Product product, const ConvShape& s, bool with_bias, const Tensor& w) {
  return call_onednn("conv2d", [&] {
    const Compiled& p = compiled(product, s, with_bias);
    if (p.w == plain_weights(s)) return w;
    Tensor out = empty({static_cast<int64_t>(p.w.get_size() / sizeof(float))});
    reorder(wrap(plain_weights(s), w.data_ptr()), wrap(p.w, out.data_ptr()));
    return out;
  });
}

/// Runs f(shape of the block, weights for it, first image) over blocks of images; the last may be
/// shorter.
template <class F>
void for_each_block(Product product, const ConvShape& s, bool with_bias, const Tensor& w, F f) {
  const int64_t block = std::min(s.n, images_per_block(s)), rest = s.n % block;
  const Tensor whole = prepared_weights(product, s.with_images(block), with_bias, w);
  const Tensor last = rest ? prepared_weights(product, s.with_images(rest), with_bias, w) : whole;
  parallel_for(s.n, block, [&](int64_t begin, int64_t end) {
    call_onednn("conv2d",
                [&] { f(s.with_images(end - begin), end - begin == block ? whole : last, begin); });
  });
}

/// Whether oneDNN serves this convolution. Patches too long to be summed in f32 go to gemm, and so do
/// sizes beyond the 32 bits that oneDNN computes positions with.
bool served(const ConvShape& s, const Tensor& t) {
  const int64_t longest = std::max(s.c, s.o) / s.groups * s.kh * s.kw;
  constexpr int64_t most = 1 << 24;
  for (int64_t size : {s.h, s.w, s.oh, s.ow, s.stride_h, s.stride_w, s.pad_h, s.pad_w,
                       s.dilation_h, s.dilation_w})
    if (size > most) return false;
  return t.dtype() == DType::f32 && longest <= 1 << 16;
}

}  // namespace

void conv_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, ConvShape s) {
  if (!served(s, x)) return im2col_forward(y, x, w, bias, s);
  const bool with_bias = bias.defined();
  for_each_block(
      Product::forward, s, with_bias, w, [&](const ConvShape& b, const Tensor& weights, int64_t n) {
        const Compiled& p = compiled(Product::forward, b, with_bias);
        p.primitive.execute(stream(),
                            {{DNNL_ARG_SRC, wrap(p.x, x.data<float>() + n * s.x_image())},
                             {DNNL_ARG_WEIGHTS, wrap(p.w, weights.data_ptr())},
                             {DNNL_ARG_BIAS, with_bias ? wrap(p.bias, bias.data_ptr()) : memory()},
                             {DNNL_ARG_DST, wrap(p.y, y.data<float>() + n * s.y_image())}});
        stream().wait();
      });
}

void conv_backward_data(const Tensor& dx, const Tensor& dy, const Tensor& w, ConvShape s) {
  if (!served(s, dy)) return im2col_backward_data(dx, dy, w, s);
  for_each_block(
      Product::data, s, false, w, [&](const ConvShape& b, const Tensor& weights, int64_t n) {
        const Compiled& p = compiled(Product::data, b, false);
        p.primitive.execute(stream(),
                            {{DNNL_ARG_DIFF_DST, wrap(p.y, dy.data<float>() + n * s.y_image())},
                             {DNNL_ARG_WEIGHTS, wrap(p.w, weights.data_ptr())},
                             {DNNL_ARG_DIFF_SRC, wrap(p.x, dx.data<float>() + n * s.x_image())}});
        stream().wait();
      });
}

namespace {

/// Some images, or some rows of the output of one: what the kernels sum in f32.
struct Part {
  ConvShape shape;
  int64_t x, dy;  // offsets of the first element
};
Part part_of(const ConvShape& s, int64_t index) {
  const int64_t rows = rows_per_sum(s);
  if (rows == s.oh) {
    const int64_t block = images_per_sum(s), n = index * block;
    return {s.with_images(std::min(block, s.n - n)), n * s.x_image(), n * s.y_image()};
  }
  const int64_t per_image = (s.oh + rows - 1) / rows, n = index / per_image,
                first = index % per_image * rows;
  ConvShape part = s.with_images(1);
  part.oh = std::min(rows, s.oh - first);
  const int64_t top = first * s.stride_h - s.pad_h,
                bottom = top + (part.oh - 1) * s.stride_h + s.dilation_h * (s.kh - 1) + 1;
  const int64_t begin = std::clamp<int64_t>(top, 0, s.h), end = std::clamp<int64_t>(bottom, 0, s.h);
  part.h = std::max<int64_t>(end - begin, 0);
  part.pad_h = std::max<int64_t>(-top, 0);
  return {part, n * s.x_image() + begin * s.w * s.c, n * s.y_image() + first * s.ow * s.o};
}
int64_t parts(const ConvShape& s) {
  const int64_t rows = rows_per_sum(s);
  if (rows < s.oh) return s.n * ((s.oh + rows - 1) / rows);
  return (s.n + images_per_sum(s) - 1) / images_per_sum(s);
}

}  // namespace

void conv_backward_weights(const Tensor& dw, const Tensor& x, const Tensor& dy, ConvShape s) {
  if (!served(s, x) || s.ow > 4 * kConvTerms)
    return im2col_backward_weights(dw, x, dy, s);
  sum_blocks(parts(s), s.weights(), dw.data<float>(), [&](int64_t b, float* out) {
    const Part part = part_of(s, b);
    if (part.shape.h == 0) return void(std::fill_n(out, s.weights(), 0.0f));  // all in the padding
    call_onednn("conv2d", [&] {
      const Compiled& p = compiled(Product::weights, part.shape, false);
      const bool plain = p.w == plain_weights(s);
      const Tensor own =
          plain ? Tensor() : empty({static_cast<int64_t>(p.w.get_size() / sizeof(float))});
      p.primitive.execute(stream(),
                          {{DNNL_ARG_SRC, wrap(p.x, x.data<float>() + part.x)},
                           {DNNL_ARG_DIFF_DST, wrap(p.y, dy.data<float>() + part.dy)},
                           {DNNL_ARG_DIFF_WEIGHTS, wrap(p.w, plain ? out : own.data_ptr())}});
      stream().wait();
      if (!plain) reorder(wrap(p.w, own.data_ptr()), wrap(plain_weights(s), out));
    });
  });
}

namespace {
const bool entered =
    kernels::conv2d.set(DeviceType::cpu, Widened<conv_forward, 1>::run, dtypes::kFloating) &&
    kernels::conv2d_backward_data.set(DeviceType::cpu, Widened<conv_backward_data, 1>::run, dtypes::kFloating) &&
    kernels::conv2d_backward_weights.set(DeviceType::cpu, Widened<conv_backward_weights, 1>::run, dtypes::kFloating);
}  // namespace

}  // namespace lockstep::cpu

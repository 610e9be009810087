// The bare products by oneDNN, single-threaded; convolutions in the layouts that it prefers.
#include "bare.h"

#include <lockstep/tensor/cpu/onednn.h>

namespace lockstep::bench {
namespace {

using dnnl::memory;
using Tag = memory::format_tag;
using cpu::engine;

std::function<void()> bare_gemm(const Product& p) {
  const Tensor a = rand({p.m, p.k}), b = rand({p.k, p.n}), c = rand({p.m, p.n});
  return [=] {
    dnnl_sgemm(p.ta ? 'T' : 'N', p.tb ? 'T' : 'N', p.m, p.n, p.k, 1, a.data<float>(),
               p.ta ? p.m : p.k, b.data<float>(), p.tb ? p.k : p.n, 0, c.data<float>(), p.n);
  };
}

/// A 3x3 convolution on the whole batch, in the layouts that oneDNN likes best; the weights, which
/// a step changes, are reordered in the call.
std::function<void()> bare_conv(const Product& p) {
  auto desc = [](memory::dims dims, Tag tag) {
    return memory::desc(std::move(dims), memory::data_type::f32, tag);
  };
  const memory::dims one{1, 1}, zero{0, 0};
  const auto x = desc({p.batch, p.in, p.size, p.size}, Tag::any),
             w = desc({p.out, p.in, 3, 3}, Tag::any), b = desc({p.out}, Tag::x),
             y = desc({p.batch, p.out, p.size - 2, p.size - 2}, Tag::any);
  const auto direct = dnnl::algorithm::convolution_direct;
  using Forward = dnnl::convolution_forward;
  using Data = dnnl::convolution_backward_data;
  using Weights = dnnl::convolution_backward_weights;
  const auto forward = cpu::forward_desc<Forward>(dnnl::prop_kind::forward_training, direct, x, w,
                                                  b, y, one, zero, zero, zero);
  dnnl::primitive primitive;
  memory::desc xd, wd, yd;
  int x_arg, w_arg, b_arg, y_arg;
  if (p.kind == Product::conv_forward) {
    primitive = Forward(forward);
    xd = forward.src_desc(), wd = forward.weights_desc(), yd = forward.dst_desc();
    x_arg = DNNL_ARG_SRC, w_arg = DNNL_ARG_WEIGHTS, b_arg = DNNL_ARG_BIAS, y_arg = DNNL_ARG_DST;
  } else if (p.kind == Product::conv_data) {
    const auto d = cpu::backward_desc<Data>(forward, direct, x, w, y, one, zero, zero, zero);
    primitive = Data(d);
    xd = d.diff_src_desc(), wd = d.weights_desc(), yd = d.diff_dst_desc();
    x_arg = DNNL_ARG_DIFF_SRC, w_arg = DNNL_ARG_WEIGHTS, b_arg = DNNL_ARG_BIAS,
    y_arg = DNNL_ARG_DIFF_DST;
  } else {
    const auto d = cpu::backward_desc<Weights>(forward, direct, x, w, b, y, one, zero, zero, zero);
    primitive = Weights(d);
    xd = d.src_desc(), wd = d.diff_weights_desc(), yd = d.diff_dst_desc();
    x_arg = DNNL_ARG_SRC, w_arg = DNNL_ARG_DIFF_WEIGHTS, b_arg = DNNL_ARG_DIFF_BIAS,
    y_arg = DNNL_ARG_DIFF_DST;
  }
  auto filled = [&](const memory::desc& d) {
    const Tensor t = rand({static_cast<int64_t>(d.get_size() / sizeof(float))});
    return std::pair(t, memory(d, engine(), t.data_ptr()));
  };
  const auto xm = filled(xd), wm = filled(wd), ym = filled(yd), bm = filled(b),
             plain = filled(desc({p.out, p.in, 3, 3}, Tag::oihw));
  const bool to_plain = p.kind == Product::conv_weights;
  const dnnl::reorder reorder(to_plain ? wm.second : plain.second,
                              to_plain ? plain.second : wm.second);
  return [=, stream = dnnl::stream(engine())]() mutable {
    memory from = to_plain ? wm.second : plain.second, to = to_plain ? plain.second : wm.second;
    if (!to_plain) reorder.execute(stream, from, to);
    primitive.execute(
        stream, {{x_arg, xm.second}, {w_arg, wm.second}, {b_arg, bm.second}, {y_arg, ym.second}});
    if (to_plain) reorder.execute(stream, from, to);
    stream.wait();
  };
}

}  // namespace

std::optional<std::function<void()>> bare(const std::vector<Product>& products) {
  const cpu::SingleThreaded scope;
  std::vector<std::function<void()>> calls;
  for (const Product& p : products)
    calls.push_back(p.kind == Product::gemm ? bare_gemm(p) : bare_conv(p));
  return [calls] {
    const cpu::SingleThreaded scope;
    for (const auto& call : calls) call();
  };
}

}  // namespace lockstep::bench

#include <lockstep/nn/conv2d.h>

#include <cmath>

#include <lockstep/nn/init.h>

namespace lockstep::nn {
namespace {
std::string pair(Size2d s) { return str_cat("(", s.h, ", ", s.w, ")"); }
}  // namespace

Conv2d::Conv2d(int64_t in, int64_t out, Size2d kernel, Conv2dOptions o) : options(o) {
  LOCKSTEP_CHECK(in > 0 && out > 0 && kernel.h > 0 && kernel.w > 0, ValueError,
                 "Conv2d: needs positive channels and kernel, got ", in, "->", out, ", kernel ",
                 kernel.h, "x", kernel.w);
  LOCKSTEP_CHECK(o.groups > 0 && in % o.groups == 0 && out % o.groups == 0, ValueError,
                 "Conv2d: channels in ", in, " and out ", out, " must be divisible by groups ",
                 o.groups);
  weight = empty({out, in / o.groups, kernel.h, kernel.w}, {.dtype = o.dtype});
  init::kaiming_uniform_(weight, {.a = std::sqrt(5.0)});
  if (!o.bias) return;
  bias = empty({out}, {.dtype = o.dtype});
  const double bound = 1 / std::sqrt(static_cast<double>(init::fans(weight).in));
  init::uniform_(bias, -bound, bound);
}

std::string Conv2d::extra_repr() const {
  std::string text = str_cat(weight.size(1) * options.groups, ", ", weight.size(0),
                             ", kernel_size=", pair({weight.size(2), weight.size(3)}),
                             ", stride=", pair(options.stride));
  if (options.padding != Size2d(0)) text += ", padding=" + pair(options.padding);
  if (options.dilation != Size2d(1)) text += ", dilation=" + pair(options.dilation);
  if (options.groups != 1) text += str_cat(", groups=", options.groups);
  if (!bias.defined()) text += ", bias=False";
  return text;
}
std::string Conv2d::brief() const {
  return str_cat(weight.size(1) * options.groups, "->", weight.size(0), ", ", weight.size(2), "x",
                 weight.size(3));
}

Tensor Conv2d::forward(const Tensor& x) {
  return conv2d(x, weight, bias,
                {.stride = options.stride,
                 .padding = options.padding,
                 .dilation = options.dilation,
                 .groups = options.groups});
}

}  // namespace lockstep::nn

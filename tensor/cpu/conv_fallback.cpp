// Convolution where oneDNN was not built in: always im2col.
#include <lockstep/tensor/cpu/conv.h>
#include <lockstep/tensor/cpu/widened.h>

namespace lockstep::cpu {
namespace {

void conv_forward(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias, ConvShape s) {
  im2col_forward(y, x, w, bias, s);
}
void conv_backward_data(const Tensor& dx, const Tensor& dy, const Tensor& w, ConvShape s) {
  im2col_backward_data(dx, dy, w, s);
}
void conv_backward_weights(const Tensor& dw, const Tensor& x, const Tensor& dy, ConvShape s) {
  im2col_backward_weights(dw, x, dy, s);
}

const bool entered =
    kernels::conv2d.set(DeviceType::cpu, Widened<conv_forward, 1>::run, dtypes::kFloating) &&
    kernels::conv2d_backward_data.set(DeviceType::cpu, Widened<conv_backward_data, 1>::run, dtypes::kFloating) &&
    kernels::conv2d_backward_weights.set(DeviceType::cpu, Widened<conv_backward_weights, 1>::run, dtypes::kFloating);

}  // namespace
}  // namespace lockstep::cpu

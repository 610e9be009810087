// Convolution where oneDNN was not built in: always im2col.
#include <lockstep/tensor/cpu/conv.h>

namespace lockstep::cpu {

void conv_forward(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor& bias,
                  const Tensor& y) {
  im2col_forward(s, x, w, bias, y);
}
void conv_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, const Tensor& dx) {
  im2col_backward_data(s, dy, w, dx);
}
void conv_backward_weights(const ConvShape& s, const Tensor& x, const Tensor& dy,
                           const Tensor& dw) {
  im2col_backward_weights(s, x, dy, dw);
}

}  // namespace lockstep::cpu

#include <lockstep/nn/activation.h>

#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/softmax.h>

namespace lockstep::nn {

Tensor ReLU::forward(Tensor x) { return relu(std::move(x)); }
Tensor GELU::forward(Tensor x) { return gelu(std::move(x)); }
Tensor SiLU::forward(Tensor x) { return silu(std::move(x)); }
Tensor Sigmoid::forward(Tensor x) { return sigmoid(std::move(x)); }
Tensor Tanh::forward(Tensor x) { return tanh(std::move(x)); }
Tensor LeakyReLU::forward(Tensor x) { return leaky_relu(std::move(x), negative_slope); }
Tensor Softmax::forward(const Tensor& x) { return softmax(x, dim); }
Tensor LogSoftmax::forward(const Tensor& x) { return log_softmax(x, dim); }

std::string LeakyReLU::extra_repr() const { return str_cat("negative_slope=", negative_slope); }
std::string Softmax::extra_repr() const { return str_cat("dim=", dim); }
std::string LogSoftmax::extra_repr() const { return str_cat("dim=", dim); }

}  // namespace lockstep::nn

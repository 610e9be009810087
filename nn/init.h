// Initialisation of weights in place, outside the graph. The numbers are drawn from
// default_generator(), so manual_seed alone decides them. Names, formulas and defaults are
// PyTorch's torch.nn.init.
#pragma once

#include <lockstep/tensor/tensor.h>

namespace lockstep::nn::init {

/// The functions return their argument. Floating dtypes only, any strides.
LOCKSTEP_API Tensor uniform_(const Tensor& t, double low = 0, double high = 1);
LOCKSTEP_API Tensor normal_(const Tensor& t, double mean = 0, double std = 1);
/// A normal distribution cut off at low and high (values, not multiples of std), by inversion of 53
/// random bits an element.
LOCKSTEP_API Tensor trunc_normal_(const Tensor& t, double mean = 0, double std = 1, double low = -2,
                                  double high = 2);
LOCKSTEP_API Tensor constant_(const Tensor& t, double value);
LOCKSTEP_API Tensor zeros_(const Tensor& t);
LOCKSTEP_API Tensor ones_(const Tensor& t);

/// How many inputs feed one output of a weight [out, in, ...], and how many outputs one input
/// feeds: in and out times the size of the kernel. Fewer than two dimensions is a ShapeError.
struct Fans {
  int64_t in, out;
};
LOCKSTEP_API Fans fans(const Tensor& weight);

enum class Nonlinearity { linear, sigmoid, tanh, relu, leaky_relu, selu };
/// The recommended gain: 1, 1, 5/3, sqrt 2, sqrt(2 / (1 + slope^2)), 3/4.
LOCKSTEP_API double calculate_gain(Nonlinearity f, double slope = 0.01);

enum class FanMode { in, out };
struct KaimingOptions {
  double a = 0;  // the negative slope of leaky_relu
  FanMode mode = FanMode::in;
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
};
/// He et al., "Delving deep into rectifiers", 2015: std = gain / sqrt(fan), bound = sqrt(3) std.
LOCKSTEP_API Tensor kaiming_uniform_(const Tensor& t, KaimingOptions options = {});
LOCKSTEP_API Tensor kaiming_normal_(const Tensor& t, KaimingOptions options = {});
/// Glorot and Bengio, 2010: std = gain sqrt(2 / (fan_in + fan_out)), bound = sqrt(3) std.
LOCKSTEP_API Tensor xavier_uniform_(const Tensor& t, double gain = 1);
LOCKSTEP_API Tensor xavier_normal_(const Tensor& t, double gain = 1);

}  // namespace lockstep::nn::init

// Tensors moved to the device "late" with their strides, so that a driver of ops tries every layout there.
#pragma once

#include <lockstep/tensor/op.h>

#include "late_device.h"

namespace late {

/// Copies the memory that x spans, gaps included.
struct ToLate {
  static constexpr const char* name = "to";
  static constexpr unsigned saves = 0;

  lockstep::Tensor forward(const lockstep::Tensor& x) const {
    using namespace lockstep;
    int64_t last = -1;
    if (x.numel() > 0) {
      last = 0;
      for (int d = 0; d < x.dim(); ++d) last += (x.shape()[d] - 1) * x.strides()[d];
    }
    const Tensor span = from_blob(x.data_ptr(), {last + 1}, {.dtype = x.dtype()});
    Tensor y = span.to(device());
    y.body().shape = x.shape();
    y.body().strides = x.strides();
    return y;
  }
  void backward(const lockstep::Saved&, const lockstep::Tensor& dy,
                lockstep::InputGradients& dx) const {
    dx.set(0, dy.to(lockstep::Device()));
  }
};
inline lockstep::Tensor moved(const lockstep::Tensor& x) {
  return x.defined() ? lockstep::apply(ToLate{}, x) : x;
}

/// Whether LOCKSTEP_TEST_DEVICE=late asks drivers to run ops there.
inline bool is_asked_for() {
  const char* name = std::getenv("LOCKSTEP_TEST_DEVICE");
  return name && std::string(name) == "late";
}

}  // namespace late

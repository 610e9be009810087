// Gradient clipping, between backward and step.
//
//   loss.backward();
//   optim::clip_grad_norm_(net.parameters(), 1.0);
//   opt.step();
#pragma once

#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep::optim {

struct ClipOptions {
  double norm_type = 2;  // p of the p-norm; infinity for the largest absolute value
  /// Throw ValueError rather than scale by a norm of NaN or infinity. Waits for the device.
  bool error_if_nonfinite = false;
};

/// Scales all gradients by max_norm / (norm + 1e-6) if that is below 1, and returns the norm of all
/// of them seen as one vector: 0-d, f64, on their device; item<double>() reads it. Parameters without a
/// gradient are skipped; gradients on several devices are a DeviceError. Gradients may have any
/// magnitude: squares and powers neither overflow nor vanish. The result does not depend on the number
/// of threads. Where it throws, no gradient without gaps in its memory has changed.
LOCKSTEP_API Tensor clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm,
                                    ClipOptions options = {});

/// Clamps every element of the gradients to [-value, value].
LOCKSTEP_API void clip_grad_value_(const std::vector<Tensor>& parameters, double value);

}  // namespace lockstep::optim

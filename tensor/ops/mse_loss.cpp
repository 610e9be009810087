#include <lockstep/tensor/ops/mse_loss.h>

#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/reduce.h>

namespace lockstep {

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  LOCKSTEP_CHECK(input.shape() == target.shape(), ShapeError,
                 "mse_loss: input and target have one shape, got ", input.shape(), " and ",
                 target.shape(), "; reshape or expand the target");
  LOCKSTEP_CHECK(is_floating(input.dtype()) && input.dtype() == target.dtype(), DTypeError,
                 "mse_loss: input and target have one floating dtype, got ", input.dtype(), " and ",
                 target.dtype());
  const Tensor errors = square(input - target);
  if (reduction == Reduction::none) return errors;
  return reduction == Reduction::mean ? mean(errors) : sum(errors);
}

}  // namespace lockstep

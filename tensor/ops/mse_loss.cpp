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
  // f16 and bf16 in f32, rounded once.
  const DType computed = compute_dtype(input.dtype());
  Tensor loss = square(input.to(computed) - target.to(computed));
  if (reduction != Reduction::none) loss = reduction == Reduction::mean ? mean(loss) : sum(loss);
  return loss.to(input.dtype());
}

}  // namespace lockstep

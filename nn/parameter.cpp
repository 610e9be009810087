#include <lockstep/nn/parameter.h>

#include <lockstep/nn/registry.h>

namespace lockstep::nn {

Parameter::Parameter(const Tensor& data, bool requires_grad)
    : Tensor(data.defined() ? data.detach() : data) {
  if (defined()) requires_grad_(requires_grad);
}

}  // namespace lockstep::nn

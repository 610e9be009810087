// The registry of living parameters, buffers and modules, by address. Internal to this folder.
#pragma once

#include <vector>

#include <lockstep/nn/parameter.h>

namespace lockstep::nn::detail {

struct LivingPart {
  uintptr_t at;
  Part what;
};
/// Those whose address lies in [begin, end), in order.
std::vector<LivingPart> parts_between(uintptr_t begin, uintptr_t end);

}  // namespace lockstep::nn::detail

// Reduction: what a loss does with its per-sample values.
#pragma once

#include <cstdint>

namespace lockstep {

enum class Reduction : uint8_t { none, mean, sum };

}  // namespace lockstep

// Activation: what a product may apply to its result while that is still in cache.
#pragma once

namespace lockstep {

enum class Activation { none, relu };

}  // namespace lockstep

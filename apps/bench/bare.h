// The bare products of a training step: straight calls of oneDNN on memory that stands ready,
// single-threaded. What a framework adds on top is its own doing.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "models.h"

namespace lockstep::bench {

/// Runs the products once per call; nothing where oneDNN was not built in.
std::optional<std::function<void()>> bare(const std::vector<Product>& products);

}  // namespace lockstep::bench

// Without oneDNN there are no bare products to compare with.
#include "bare.h"

namespace lockstep::bench {

std::optional<std::function<void()>> bare(const std::vector<Product>&) { return std::nullopt; }

}  // namespace lockstep::bench

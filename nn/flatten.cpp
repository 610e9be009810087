#include <lockstep/nn/flatten.h>

namespace lockstep::nn {

std::string Flatten::extra_repr() const {
  return str_cat("start_dim=", start_dim, ", end_dim=", end_dim);
}

}  // namespace lockstep::nn

#include <lockstep/nn/dropout.h>

#include <lockstep/tensor/ops/elementwise.h>

namespace lockstep::nn {

Dropout::Dropout(double p) : p(p) {
  LOCKSTEP_CHECK(p >= 0 && p <= 1, ValueError, "Dropout: p must lie in [0, 1], got ", p);
}
std::string Dropout::extra_repr() const { return str_cat("p=", p); }
Tensor Dropout::forward(Tensor x) { return dropout(std::move(x), p, is_training()); }

}  // namespace lockstep::nn

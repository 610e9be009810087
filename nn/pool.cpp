#include <lockstep/nn/pool.h>

namespace lockstep::nn {

std::string MaxPool2d::extra_repr() const {
  auto text = [](Size2d s) {
    return s.h == s.w ? str_cat(s.h) : str_cat("(", s.h, ", ", s.w, ")");
  };
  return str_cat("kernel_size=", text(kernel), ", stride=", text(options.stride.value_or(kernel)),
                 ", padding=", text(options.padding));
}

std::string MaxPool2d::brief() const { return str_cat(kernel.h, "x", kernel.w); }

}  // namespace lockstep::nn

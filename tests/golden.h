// Reading the values in tests/golden, and comparing with them.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/tensor/safetensors.h>

class Golden {
 public:
  explicit Golden(const std::string& file)
      : file_(lockstep::load_safetensors(std::string(LOCKSTEP_TEST_DATA) + "/golden/" + file)) {}
  const lockstep::Tensor& operator[](const std::string& name) const { return file_.at(name); }
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  /// All tensors whose name begins with the prefix, without it.
  lockstep::NamedTensors under(const std::string& prefix) const {
    lockstep::NamedTensors found;
    for (auto& [name, t] : file_.tensors)
      if (name.starts_with(prefix)) found.emplace_back(name.substr(prefix.size()), t);
    return found;
  }

 private:
  lockstep::Safetensors file_;
};

/// The largest absolute difference; infinite where shapes differ or a NaN meets a number.
inline double difference(const lockstep::Tensor& a, const lockstep::Tensor& b) {
  if (a.shape() != b.shape()) return INFINITY;
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) != std::isnan(y[i])) return INFINITY;
    if (x[i] != y[i] && !std::isnan(x[i])) largest = std::max(largest, std::abs(x[i] - y[i]));
  }
  return largest;
}

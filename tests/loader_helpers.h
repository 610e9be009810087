// What the tests of Loader share: passes as lists of batches, and a dataset with a callback.
#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/data/loader.h>
#include <lockstep/data/tensor_dataset.h>

namespace loader_helpers {

using namespace lockstep;

using Batches = std::vector<std::vector<int64_t>>;

inline data::TensorDataset<1> numbers(int64_t n) { return data::TensorDataset{arange(0, n)}; }

template <class L>
Batches collect(L& loader, int64_t epoch) {
  Batches all;
  for (auto [x] : loader.epoch(epoch)) all.push_back(x.template to_vector<int64_t>());
  return all;
}

inline int thread_count() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
  return -1;
}

// Samples are their index; `at` is called with it on whichever thread makes it.
struct Probe {
  int64_t n = 0;
  std::function<void(int64_t)> at;
  int64_t size() const { return n; }
  int64_t get(int64_t index) const {
    if (at) at(index);
    return index;
  }
};

}  // namespace loader_helpers

// What the tests of Loader share: passes as lists of batches, and a dataset with a callback.
#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
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

/// The threads of this process. The thread sanitizer starts one of its own with a program's first,
/// which is therefore started here.
inline int thread_count() {
  std::thread([] {}).join();
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
  return -1;
}

/// Whether no more than `before` threads are left, soon: /proc counts a joined one for a moment.
inline bool threads_are_gone(int before) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (thread_count() > before)
    if (std::chrono::steady_clock::now() > deadline) return false;
  return true;
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

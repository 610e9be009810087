// What a backward knows of each node on its way: which gradients have arrived, and how many are still
// to come. Internal to this folder.
#pragma once

#include <algorithm>
#include <vector>

#include <lockstep/tensor/node.h>

namespace lockstep::engine {

/// The gradient of one output of a node during a backward.
struct Arrival {
  Tensor gradient;   // the sum of those that have arrived
  bool own = false;  // `gradient` is referenced nowhere else: it may be added to in place
  int capture = -1;  // index among grad()'s inputs
};

/// State of one node during a backward.
struct Task {
  int pending = 0;     // uses whose gradient has not arrived yet
  bool needed = true;  // leads to a leaf that accumulates, or to one of grad()'s inputs
  bool slot = false;   // of a leaf: its slot is lent to this backward
  Arrival first;       // of output 0
  std::vector<Arrival> others;

  Arrival& at(const Edge& edge) {
    if (edge.output == 0) return first;
    if (others.empty()) others.resize(static_cast<size_t>(edge.node->outputs()) - 1);
    return others[static_cast<size_t>(edge.output) - 1];
  }
  bool captured() const {
    return first.capture >= 0 || std::any_of(others.begin(), others.end(),
                                             [](const Arrival& a) { return a.capture >= 0; });
  }
  bool arrived() const {
    return first.gradient.defined() ||
           std::any_of(others.begin(), others.end(),
                       [](const Arrival& a) { return a.gradient.defined(); });
  }
};

/// The dtype in which the gradient of this output is wanted.
inline DType gradient_dtype(const Edge& edge) {
  const Leaf* leaf = edge.node->as_leaf();
  return leaf ? leaf->gradient_dtype() : edge.node->output(edge.output).dtype;
}

/// Whether several elements of t share memory, as after expand.
inline bool repeats(const Tensor& t) {
  for (int d = 0; d < t.dim(); ++d)
    if (t.strides()[d] == 0 && t.shape()[d] > 1) return true;
  return false;
}

}  // namespace lockstep::engine

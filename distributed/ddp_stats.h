// DdpStats: what DistributedDataParallel did in its last synchronised backward, and how often. How
// far a backward had come is counted in gradients that had arrived, which is the same on a busy
// machine as on an idle one; times are seconds of this rank's clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

struct LOCKSTEP_API DdpStats {
  struct BucketTrace {
    size_t bytes = 0;
    std::vector<std::string> parameters = {};
    int launched_after = 0;    // gradients there when its reduction was launched
    int completed_after = -1;  // gradients there when it was first seen complete; -1: at the end
    double seconds = 0;        // from its launch until it was seen complete
  };
  std::vector<BucketTrace> buckets = {};              // in the order of launch
  std::vector<std::string> arrival_order = {};        // parameters, as their gradients arrived
  std::vector<std::vector<std::string>> unused = {};  // by rank: parameters without a gradient
  int arrivals = 0;                                   // gradients that backward produced
  double forward = 0, backward = 0;                   // seconds; backward with the reduction in it
  double final_wait = 0;  // seconds spent waiting after backward's last node
  int64_t forwards = 0, synchronised_backwards = 0, local_backwards = 0;  // so far
  size_t gradient_bytes = 0;                                              // memory of all buckets
  bool static_graph_is_safe = true;  // every rank used the same parameters in each reduction so far

  /// Seconds between launch and completion, summed over the buckets; how many of them were hidden
  /// behind backward is what remains when final_wait is taken off.
  double communication() const;
  /// Bytes of buckets that were complete before the last gradient arrived, over all bytes.
  double overlap() const;
  /// Some lines for people.
  std::string text() const;
};

}  // namespace lockstep::dist

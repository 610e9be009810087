// Bucket: gradients of one dtype side by side in memory that the process group reduces in place.
// Each parameter's slot is its gradient; filling the bucket is what backward does anyway.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/process_group.h>
#include <lockstep/tensor/node.h>

namespace lockstep::dist {

/// A trainable parameter under DDP.
struct Replicated {
  std::string name;
  Tensor parameter;
  Ref<Leaf> leaf;
};

struct Bucket {
  std::vector<int> parameters;  // indices, in the order of their slots
  DType dtype;
  int64_t elements = 0;  // slots begin at multiples of 64 bytes
  Tensor flat;           // [elements], over the group's memory
  std::string label;     // for errors: "DDP bucket 1 (fc1.weight and 2 more)"

  size_t bytes() const { return static_cast<size_t>(elements) * size_of(dtype); }
};

struct BucketCaps {
  size_t first_bytes, cap_bytes;
};

/// Groups parameters, taken in `order`, into buckets of one dtype and device; a bucket closes when
/// it reaches its cap, and the very first cap is small so that reduction starts early.
std::vector<Bucket> plan_buckets(const std::vector<Replicated>& parameters,
                                 const std::vector<int>& order, BucketCaps caps);

/// Reserves the group's memory for the buckets (a collective call) and makes `slots[i]` views of
/// it, one for each parameter. A slot that exists keeps its identity and its values and is
/// re-pointed.
void place_buckets(ProcessGroup& group, const std::vector<Replicated>& parameters,
                   std::vector<Bucket>& buckets, std::vector<Tensor>& slots);

}  // namespace lockstep::dist

// Whether the parameters are the same on every rank, as DDP leaves them. A rank that skips an
// optimizer step, loads other values or writes to a parameter alone trains another model from then
// on, and every collective still fits.
//
// In every round each rank sends a hash of a few elements of each parameter, other elements each
// time, and how often parameters were written. Where these differ the ranks compare hashes of all
// elements.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

struct ReplicaSample {
  uint64_t elements = 0;                // a hash of the elements that a round looks at
  uint64_t processor = 0;               // ranks on unlike processors may round differently
  uint32_t had_unwrapped_backward = 0;  // then the rank's steps are its own
};

/// A hash of some elements of each parameter; which ones depends on `round` alone.
uint64_t sample_of(const NamedTensors& parameters, uint64_t round);

/// A hash of what decides how this process rounds: the processor's kind and LOCKSTEP_MAX_ISA.
uint64_t processor_kind();

/// Compares all elements. Returns the index of the first parameter that differs between ranks, and
/// the lowest rank where it is not rank 0's; {-1, 0} when all are equal. A collective call.
std::pair<int, int> compare_replicas(ProcessGroup& group, const NamedTensors& parameters);

}  // namespace lockstep::dist

// Many tensors as one: agreement on a module across ranks, and the transfer of its values in one
// piece.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <lockstep/distributed/ddp_options.h>
#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

/// The bytes of all tensors, one after the other: u8 [total]. What a tensor repeats (an expanded
/// dimension) is there once.
Tensor pack(const NamedTensors& tensors);
/// Writes packed bytes back into the tensors' own memory.
void unpack(const Tensor& bytes, const NamedTensors& tensors);
/// Puts packed bytes into fresh storage behind the tensors, so that what was saved of the old
/// stays. Tensors that share memory get shared memory, and those that hold these bytes already are
/// left as they are.
void unpack_fresh(const Tensor& bytes, const NamedTensors& tensors);

/// Compares names, dtypes, shapes, strides, trainability, order and shared memory of all entries, and
/// the options, across ranks. On a difference every rank destroys the group and throws a DistError
/// with both counts and the first entry that differs.
void verify_same_module(ProcessGroup& group, const NamedTensors& parameters,
                        const NamedTensors& buffers, const DistributedDataParallelOptions& options);

}  // namespace lockstep::dist

// Agreement: work that can fail on some ranks, or that one rank does for all, ends alike on every
// rank, so that none waits in a collective call for one that has thrown.
#pragma once

#include <functional>

#include <lockstep/distributed/group.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::dist {

/// Runs f on every rank. If it throws on some ranks, these rethrow; the others throw an error with
/// the text of the lowest such rank's, an IoError or ValueError where that is one, else a DistError.
/// f makes no collective call; this is one.
LOCKSTEP_API void all_or_none(const Group& group, const std::function<void()>& f);

/// The root's tensors with their names, on every rank; what the others give is ignored. On the CPU.
/// A collective call.
LOCKSTEP_API NamedTensors broadcast_named(const Group& group, NamedTensors tensors, int root);

}  // namespace lockstep::dist

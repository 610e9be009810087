// Agreement: ranks go on together or not at all. What only some of them do, or only some can fail
// at, ends alike on every rank.
#pragma once

#include <functional>

#include <lockstep/distributed/group.h>
#include <lockstep/tensor/safetensors.h>

namespace lockstep::dist {

/// Runs f on every rank. If it throws on some, those rethrow; the others throw an error of the same
/// text and, for IoError and ValueError, type (else DistError) as the lowest of them. f makes no
/// collective call; this is one.
LOCKSTEP_API void all_or_none(const Group& group, const std::function<void()>& f);

/// The root's tensors with their names, on every rank; what the others give is ignored. On the CPU.
/// A collective call.
LOCKSTEP_API NamedTensors broadcast_named(const Group& group, NamedTensors tensors, int root);

}  // namespace lockstep::dist

// How a checkpoint's file is laid out: the metadata say that it is one and which parts it has;
// "model.fc1.weight" is an entry of a part that rank 0 saved, "hook.rank.3.error" of one that each
// rank has for itself, and "generator", i64 [ranks, 2], holds seed and offset of every rank's
// default generator.
#pragma once

#include <lockstep/distributed/checkpoint.h>
#include <lockstep/tensor/random.h>

namespace lockstep::dist::checkpoint_format {

inline constexpr const char* kVersionKey = "lockstep_checkpoint";
inline constexpr const char* kVersion = "1";
inline constexpr const char* kPartsKey = "parts";
inline constexpr const char* kGenerators = "generator";

/// What the entries of a part begin with.
std::string prefix_of(const CheckpointPart& part, int rank);
/// The parts' names with dots between them, which none of them has inside.
std::string names_of(const std::vector<CheckpointPart>& parts);
/// ValueError for names that cannot be, or not together.
void check_names(const char* op, const std::vector<CheckpointPart>& parts);

/// What the entry "generator" holds. A collective call.
Tensor all_generators(const Group& group);
/// From that entry this rank's own, as it was. At another number of ranks draws cannot repeat, and
/// must not repeat earlier ones either: the common seed (or, where seeds differ by rank, the one
/// that this rank has) from the largest offset on. ValueError for an entry of another form.
Generator own_generator(const Tensor& saved, const Group& group);

}  // namespace lockstep::dist::checkpoint_format

// The layout of a checkpoint file. Metadata: that it is one, and its parts. Entries:
// "model.fc1.weight" of a part that rank 0 saved, "hook.rank.3.error" of a part that each rank has
// for itself, and "generator", i64 [ranks, 2], seed and offset of every rank's default generator.
#pragma once

#include <lockstep/distributed/checkpoint.h>
#include <lockstep/tensor/random.h>

namespace lockstep::dist::checkpoint_format {

inline constexpr const char* kVersionKey = "lockstep_checkpoint";
inline constexpr const char* kVersion = "1";
inline constexpr const char* kPartsKey = "parts";
inline constexpr const char* kGenerators = "generator";

/// The first part of its entries' names.
std::string prefix_of(const CheckpointPart& part, int rank);
/// The parts' names joined by dots, which no name contains.
std::string names_of(const std::vector<CheckpointPart>& parts);
/// ValueError for an empty name, one with a dot, and one given twice.
void check_names(const char* op, const std::vector<CheckpointPart>& parts);

/// What the entry "generator" holds. A collective call.
Tensor all_generators(const Group& group);
/// This rank's generator from that entry. At another number of ranks the saving run's numbers cannot
/// be continued, and none may be drawn twice: the common seed (or, where seeds differ by rank, this
/// rank's present one) from the largest offset on. ValueError for an entry of another form.
Generator own_generator(const Tensor& saved, const Group& group);

}  // namespace lockstep::dist::checkpoint_format

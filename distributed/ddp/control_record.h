// ControlRecord: what each rank tells the others about one synchronised backward, fixed before its
// first launch: which parameters it uses and trains, and what it has run since the last one. All ranks
// read all records, so a fault is the same error on each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <lockstep/distributed/ddp/replicas.h>
#include <lockstep/distributed/ddp_options.h>

namespace lockstep::dist {

struct ControlRecord {
  enum class Join : uint8_t { none, active, finished };

  /// What the rank has run since the last reduction.
  struct Since {
    uint32_t forwards = 0;          // in training mode
    uint32_t skipped_forwards = 0;  // of these, whose backward was left out
    uint32_t batches = 0;           // taken from loaders with a shard
    uint32_t local_backwards = 0;
    uint32_t writes = 0;  // of parameters
  };
  Since since;
  ReplicaSample sample;
  int32_t unfrozen = -1;  // among the parameters frozen at construction: one that now trains
  Join join = Join::none;
  JoinOptions join_options = {};
  std::vector<char> used = {}, trainable = {};  // by parameter

  /// Whether the rank had no more inputs: it used nothing because there was nothing.
  bool is_finished() const { return join == Join::finished; }

  std::vector<std::byte> encode() const;
  /// Throws DistError when the bytes are not a record of so many parameters.
  static ControlRecord decode(std::span<const std::byte> bytes, size_t parameters);
};

/// The names behind a record's indices.
struct RecordNames {
  std::vector<std::string> parameters;  // under DDP
  std::vector<std::string> frozen;      // at construction
};

/// Why the ranks cannot go on, from their records: "DDP: fc3.weight received no gradient on rank 1;
/// ..."; empty when they can. `first` holds the records of the first round, which a static graph must
/// repeat; it is empty before, and the record of a rank that had no inputs then says nothing.
std::string find_fault(const std::vector<ControlRecord>& records,
                       const std::vector<ControlRecord>& first, const RecordNames& names,
                       const DistributedDataParallelOptions& options);

/// Whether any rank used a parameter.
bool is_used(const std::vector<ControlRecord>& records, size_t parameter);
/// Whether it requires grad on some rank.
bool is_trained(const std::vector<ControlRecord>& records, size_t parameter);

}  // namespace lockstep::dist

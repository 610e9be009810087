// Call: what one rank asked for, as plain words that the other ranks can read and compare; and
// Pattern, what each kind of call does: who offers a stream of data, who takes from it, and
// whether what is taken is the ranks' streams combined. The operations know no kinds, only this.
#pragma once

#include <cstdint>
#include <string>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

/// A CollectiveKind, or, after the last of those, what a communicator does for itself.
enum class CallKind : uint8_t {
  child = static_cast<uint8_t>(CollectiveKind::recv) + 1,
  allocate,
  new_group
};

struct Call {
  CallKind kind = static_cast<CallKind>(CollectiveKind::barrier);
  ReduceOp reduce = ReduceOp::sum;
  DType dtype = DType::u8;
  int32_t dims = 0;
  int32_t root = 0;
  uint64_t sequence = 0;
  uint64_t allocation =
      0;  // the shared allocation that holds the tensor, or 0: it streams through the window
  uint64_t offset = 0;  // in it, in bytes
  int64_t shape[Shape::kMaxDims] = {};

  static Call of(const Collective& c);
  bool is(CollectiveKind k) const { return kind == static_cast<CallKind>(k); }
  bool agrees_with(const Call& other) const;
  int64_t numel() const;
  /// "all_reduce(sum) of f32 [10]".
  std::string text() const;
};

/// A call as messages name it: "all_reduce(sum) of f32 [10], sequence number 5 (label)".
struct NamedCall {
  Call call;
  std::string label = {};
  std::string text() const;
};

enum class Who : uint8_t { nobody, all, root, all_but_root };

struct Pattern {
  bool combines = false;  // all offer, the streams are combined, and that is taken
  Who offers = Who::nobody, takes = Who::nobody;
  bool parts = false;  // a stream has a part for each rank, else all of it is for every taker

  static const Pattern& of(const Call& call);
};
inline bool is_among(Who who, int rank, int root) {
  return who == Who::all || (who == Who::root && rank == root) ||
         (who == Who::all_but_root && rank != root);
}

}  // namespace lockstep::dist

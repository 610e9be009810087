// SharedArea: what the ranks of one communicator share, laid over zeroed memory. Every word has one
// writer or only grows, and nothing is ever reset, so nobody waits for permission to reuse anything
// but a lane.
//
// Collective number s uses lane s % kLanes. A lane has a call (what each rank asked for, compared
// before data moves), marks (how far each rank is), two counters for reductions (chunks claimed,
// chunks done) and, for tensors that do not lie in shared memory, a window of some chunks per rank
// through which they stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <lockstep/distributed/process_group.h>
#include <lockstep/distributed/segment.h>

namespace lockstep::dist {

inline constexpr int kLanes = 8;
inline constexpr size_t kChunkBytes = 32 << 10;
inline constexpr uint64_t kLongestWindow = 16;
inline constexpr size_t kRecordBytes = 4096;

enum class CallKind : uint8_t { all_reduce, broadcast, all_gather, barrier, child, allocate };

/// What one rank asked for.
struct Call {
  CallKind kind = CallKind::barrier;
  ReduceOp reduce = ReduceOp::sum;
  DType dtype = DType::u8;
  int32_t dims = 0;
  int32_t root = 0;
  uint64_t sequence = 0;
  uint64_t allocation =
      0;  // the shared allocation that holds the tensor, or 0: it streams through the window
  uint64_t offset = 0;  // in it, in bytes
  int64_t shape[Shape::kMaxDims] = {};

  bool agrees_with(const Call& other) const;
  /// "all_reduce(sum) of f32 [10]".
  std::string text() const;
};

struct alignas(64) PostedCall {
  Call call;
};

/// One rank's progress in a lane. Chunk counts run on from operation to operation.
struct alignas(64) Mark {
  std::atomic<uint64_t> arrived;   // sequence number of the call that stands in the lane
  std::atomic<uint64_t> offered;   // chunks others may read
  std::atomic<uint64_t> consumed;  // chunks of others that were read
  std::atomic<uint64_t> left;      // sequence number of the last operation completed here
};

struct alignas(64) Lane {
  std::atomic<uint64_t> claimed;  // chunks; the highest bit is the poison mark
  alignas(64) std::atomic<uint64_t> done;
  alignas(64) std::atomic<uint64_t> finished[kLongestWindow];  // by place in the window: the last
                                                               // finished chunk's number + 1
};
inline constexpr uint64_t kPoison = uint64_t{1} << 63;

/// What a rank publishes for an epoch; two per rank, by the epoch's parity.
struct alignas(64) Record {
  std::atomic<uint64_t> epoch;  // + 1
  uint64_t bytes;
  std::byte data[kRecordBytes];
};

class SharedArea {
 public:
  static size_t bytes_for(int size);
  /// Laid over zeroed memory at `offset` of a segment; without one it only measures.
  SharedArea(std::shared_ptr<Segment> segment, size_t offset, int size);

  Lane& lane(uint64_t sequence) const { return lanes_[sequence % kLanes]; }
  Mark& mark(uint64_t sequence, int rank) const {
    return marks_[sequence % kLanes * size_ + static_cast<size_t>(rank)];
  }
  Call& call(uint64_t sequence, int rank) const {
    return calls_[sequence % kLanes * size_ + static_cast<size_t>(rank)].call;
  }
  Record& record(uint64_t epoch, int rank) const {
    return records_[(epoch & 1) * size_ + static_cast<size_t>(rank)];
  }
  /// How many chunks a window holds: fewer where there are many ranks.
  uint64_t window_chunks() const { return window_chunks_; }
  /// The place of a rank's chunk in its window.
  std::byte* window(uint64_t sequence, int rank, uint64_t chunk) const {
    const size_t slot = (sequence % kLanes * size_ + static_cast<size_t>(rank)) * window_chunks_ +
                        chunk % window_chunks_;
    return windows_ + slot * kChunkBytes;
  }
  /// Set once a rank has said goodbye.
  std::atomic<uint32_t>& gone(int rank) const { return gone_[rank]; }
  /// Stops all claims for good and leaves the reason; the first rank's text stays.
  void poison(int rank, const std::string& text) const;
  bool poisoned() const { return head_->poisoned.load(std::memory_order_acquire) != 0; }
  std::string poison_text() const;

 private:
  struct alignas(64) Head {
    std::atomic<uint32_t> poisoned;  // 1 + the rank whose text counts
  };
  struct alignas(64) Text {
    char words[1024];
  };

  std::shared_ptr<Segment> segment_;
  size_t size_;
  uint64_t window_chunks_;
  size_t bytes_;
  Head* head_;
  std::atomic<uint32_t>* gone_;
  Text* texts_;  // by rank
  Lane* lanes_;
  Mark* marks_;
  PostedCall* calls_;
  Record* records_;
  std::byte* windows_;
};

}  // namespace lockstep::dist

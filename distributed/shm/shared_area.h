// SharedArea: what the ranks of one communicator share, laid over zeroed memory. Shared words have
// one writer or only grow, and carry the sequence number, so there is no phase that resets them.
// Only a lane is reused, once all ranks have left it.
//
// Collective number s uses lane s % kLanes. A lane has a call (what each rank asked for, compared
// before data moves), marks (how far each rank is), counts of what each took from each, two
// counters for reductions (chunks claimed, chunks done) and, for tensors that do not lie in shared
// memory, a window of some chunks per rank through which they stream. Sends and receives have a
// pair of words per ordered pair of ranks, and an outbox per sender.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <lockstep/distributed/peer_error.h>
#include <lockstep/distributed/shm/call.h>
#include <lockstep/distributed/shm/segment.h>
#include <lockstep/distributed/shm/shared_text.h>

namespace lockstep::dist {

inline constexpr int kLanes = 8;
inline constexpr size_t kChunkBytes = 32 << 10;
inline constexpr uint64_t kLongestWindow = 16;

// Counters carry the operation that they count for: the low 31 bits of its sequence number, then
// the count. So a counter of an older operation reads as 0, and nobody resets it.
inline constexpr uint64_t kPoison = uint64_t{1} << 63;
inline constexpr uint64_t counted(uint64_t sequence, uint64_t count) {
  return (sequence & 0x7FFFFFFF) << 32 | count;
}
inline constexpr uint64_t count_in(uint64_t word, uint64_t sequence) {
  return (word & ~kPoison) >> 32 == (sequence & 0x7FFFFFFF) ? word & 0xFFFFFFFF : 0;
}

struct alignas(64) PostedCall {
  Call call;
};

/// One rank's progress in a lane.
struct alignas(64) Mark {
  std::atomic<uint64_t> arrived;  // sequence number of the call that stands in the lane
  std::atomic<uint64_t> offered;  // counted: chunks of its stream others may read
  std::atomic<uint64_t> left;     // sequence number of the last operation completed here
};

/// A slot of the ring of collectives that may be under way at once.
struct alignas(64) Lane {
  std::atomic<uint64_t> claimed;           // counted chunks; the highest bit is the poison mark
  alignas(64) std::atomic<uint64_t> done;  // counted chunks
  alignas(64) std::atomic<uint64_t> finished[kLongestWindow];  // by place in the window: counted,
                                                               // the last finished chunk + 1
};

/// What stands between a sender and a receiver; both count their transfers from 1.
struct alignas(64) Pair {
  std::atomic<uint64_t> announced;                      // number of the newest receive
  std::atomic<uint64_t> wanted;                         // its elements << 8 | dtype
  std::atomic<uint64_t> sent;                           // counted: chunks in the sender's outbox
  std::atomic<uint64_t> taken;                          // counted: chunks the receiver has read
  std::atomic<uint64_t> sends_called, receives_called;  // begun or waiting for their turn
};

/// What a rank publishes for an epoch; two per rank, by the epoch's parity.
struct alignas(64) Record {
  std::atomic<uint64_t> epoch;  // + 1
  uint64_t bytes;
  std::byte data[kRecordBytes];
};

/// How many collectives a rank has called, those that wait for their turn included.
struct alignas(64) Called {
  std::atomic<uint64_t> collectives;
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
  /// Counted: the chunks that `taker` has read of the stream of `source`.
  std::atomic<uint64_t>& taken(uint64_t sequence, int taker, int source) const {
    return taken_[row(sequence, taker) + static_cast<size_t>(source)];
  }
  /// The elements that a rank's all_to_all sends to each rank, and expects from each.
  int64_t* gives(uint64_t sequence, int rank) const { return gives_ + row(sequence, rank); }
  int64_t* wants(uint64_t sequence, int rank) const { return wants_ + row(sequence, rank); }
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
  Pair& pair(int from, int to) const {
    return pairs_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)];
  }
  /// The place of a chunk in the outbox of a rank.
  std::byte* outbox(int rank, uint64_t chunk) const {
    return outboxes_ +
           (static_cast<size_t>(rank) * window_chunks_ + chunk % window_chunks_) * kChunkBytes;
  }
  std::atomic<uint64_t>& called(int rank) const { return called_[rank].collectives; }
  /// Set once a rank has said goodbye.
  std::atomic<uint32_t>& gone(int rank) const { return gone_[rank]; }
  /// What the errors of other ranks say of a rank; at most kNoteBytes.
  SharedText<kNoteBytes + 1>& note(int rank) const { return notes_[rank].text; }
  /// Stops all claims for good and leaves the reason; the first rank's stays.
  void poison(int rank, const Ending& why) const;
  bool poisoned() const { return head_->poisoned.load(std::memory_order_acquire) != 0; }
  Ending ending() const;

 private:
  struct alignas(64) Head {
    std::atomic<uint32_t> poisoned;  // 1 + the rank whose text counts
  };
  struct alignas(64) Reason {
    std::atomic<Cause> cause;
    SharedText<4096> text;
  };
  struct alignas(64) Note {
    SharedText<kNoteBytes + 1> text;
  };
  size_t row(uint64_t sequence, int rank) const {
    return (sequence % kLanes * size_ + static_cast<size_t>(rank)) * row_;
  }

  std::shared_ptr<Segment> segment_;
  size_t size_;
  size_t row_;  // words in a row of one per rank: whole cache lines
  uint64_t window_chunks_;
  size_t bytes_;
  Head* head_;
  std::atomic<uint32_t>* gone_;
  Called* called_;   // by rank
  Reason* reasons_;  // by rank
  Note* notes_;      // by rank
  Lane* lanes_;
  Mark* marks_;
  PostedCall* calls_;
  std::atomic<uint64_t>* taken_;
  int64_t *gives_, *wants_;
  Record* records_;
  Pair* pairs_;
  std::byte *windows_, *outboxes_;
};

}  // namespace lockstep::dist

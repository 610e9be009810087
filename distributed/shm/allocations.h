// Allocations: the pieces of shared memory that a communicator handed out, with one part per rank.
// A tensor that lies in one is reduced in place, by whichever ranks poll.
#pragma once

#include <memory>
#include <vector>

#include <lockstep/distributed/shm/segment.h>
#include <lockstep/tensor/storage.h>

namespace lockstep::dist {

class Allocations {
 public:
  static size_t segment_bytes(size_t bytes, int size);
  /// Takes a segment in; returns this rank's part. The memory goes when all ranks have dropped
  /// theirs.
  Ref<Storage> add(std::shared_ptr<Segment> segment, size_t bytes, int rank, int size);

  struct Place {
    uint64_t id = 0;  // 0: nowhere in here
    uint64_t offset = 0;
  };
  /// Where in this rank's parts [data, data + bytes) lies.
  Place find(const std::byte* data, size_t bytes, int rank) const;
  /// The byte of a rank's part that a place names.
  std::byte* at(Place place, int rank) const;
  /// Lets go of what all ranks have dropped.
  void purge(int size);

 private:
  struct Entry {
    uint64_t id;
    std::shared_ptr<Segment> segment;
    size_t stride;
    std::byte* part(int rank) const;
  };
  std::vector<Entry> entries_;
  uint64_t last_id_ = 0;
};

}  // namespace lockstep::dist

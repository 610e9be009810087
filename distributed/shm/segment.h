// Segment: zeroed memory that all ranks of one host see: a nameless memory file between processes,
// plain memory between threads. It lives until its last user drops it; nothing is left behind by a
// killed process.
#pragma once

#include <cstddef>
#include <memory>

#include <lockstep/distributed/fd.h>
#include <lockstep/tensor/process.h>

namespace lockstep::dist {

class LOCKSTEP_API Segment {
 public:
  /// Plain memory, for ranks that are threads. Throws OutOfMemory.
  static std::shared_ptr<Segment> plain(size_t bytes);
  /// A memory file of `bytes` bytes whose pages are reserved now: lack of memory is an OutOfMemory
  /// here and never a SIGBUS later. Sealed, so that no holder can resize it.
  static Fd make_file(size_t bytes);
  /// Maps such a file. The mapping is not inherited by forked children. Throws DistError for a file
  /// that is not of this size or may shrink, whose holder could kill us.
  static std::shared_ptr<Segment> map(int file, size_t bytes);

  Segment(const Segment&) = delete;
  ~Segment();
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// False in a forked child, which must not touch it.
  bool is_here() const { return origin_.is_here(); }

 private:
  Segment(std::byte* data, size_t bytes);
  std::byte* data_;
  size_t bytes_;
  Origin origin_;
};

/// How many bytes machine and control groups have left for new memory, reclaimable file cache
/// included.
size_t memory_left();

}  // namespace lockstep::dist

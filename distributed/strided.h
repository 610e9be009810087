// StridedBytes: the elements of a strided tensor as one row-major sequence, read from and written
// to in pieces. This is how collectives move tensors that do not lie in shared memory.
#pragma once

#include <cstddef>

#include <lockstep/tensor/tensor.h>

namespace lockstep::dist {

class StridedBytes {
 public:
  StridedBytes() = default;
  explicit StridedBytes(const Tensor& t);

  /// Elements [first, first + count) of the sequence into `to`.
  void read(int64_t first, int64_t count, std::byte* to) const;
  /// The same elements from `from`.
  void write(int64_t first, int64_t count, const std::byte* from) const;
  bool dense() const { return dims_ == 0; }
  /// The first element.
  std::byte* data() const { return data_; }

 private:
  template <class Row>
  void walk(int64_t first, int64_t count, Row row) const;

  std::byte* data_ = nullptr;
  size_t element_ = 1;
  int dims_ = 0;                      // 0: contiguous
  int64_t sizes_[Shape::kMaxDims];    // outermost first, neighbours merged where strides allow
  int64_t strides_[Shape::kMaxDims];  // in bytes
};

/// Whether two indices share an element (an expanded dimension): such a tensor can be read, not
/// written.
bool has_overlap(const Tensor& t);

}  // namespace lockstep::dist
